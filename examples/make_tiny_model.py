"""Make a tiny Llama with a tokenizer of single characters: something to serve without a download."""

import argparse
from pathlib import Path

from rlctl.demo import tiny

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("directory", type=Path, help="where the checkpoint goes")
parser.add_argument("--experts", action="store_true", help="a Mixtral with four experts in place of the Llama")
arguments = parser.parse_args()
make = tiny.make_experts if arguments.experts else tiny.make
tiny.save(make(seed=0), arguments.directory)
print(f"saved to {arguments.directory}")
