"""Make a tiny Llama with a tokenizer of single characters: something to serve without a download."""

import argparse
from pathlib import Path

from rlctl.demo import tiny

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("directory", type=Path, help="where the checkpoint goes")
directory = parser.parse_args().directory
tiny.save(tiny.make(seed=0), directory)
print(f"saved to {directory}")
