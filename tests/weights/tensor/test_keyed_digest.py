"""The keyed digest: its values, its sums, what it sees, and how often it would not."""

from __future__ import annotations

import hashlib
import itertools
import random
import time
from collections.abc import Callable, Sequence

import pytest
import torch

from rlctl.contract.errors import Reason, RlctlError
from rlctl.weights.tensor import keyed_digest
from rlctl.weights.tensor.digest import ModelDigest, part_digest, tensor_digest, tensor_digests
from rlctl.weights.tensor.keyed_digest import BLOCK, LANES, Sum, keyed_sums
from rlctl.weights.tensor.slices import Shard, Slice
from rlctl.weights.tensor.tensors import TensorMeta, as_bytes
from rlctl.weights.tensor.work import Stop

KEY = bytes(range(16))
WORD = 2**64

CASES = [
    ((), torch.float32),
    ((5,), torch.bfloat16),
    ((5000,), torch.bfloat16),
    ((3, 4200), torch.bfloat16),
    ((2, 3, 7), torch.float32),
    ((2, 3, 4, 5), torch.int8),
    ((4, 2), torch.bool),
    ((3, 5), torch.float8_e4m3fn),
    ((2, 3), torch.float64),
    ((0, 4), torch.float32),
    ((4, 0), torch.float32),
]


def made(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def by_the_formula(key: bytes, full: torch.Tensor) -> Sum:
    """The sum that docs/digests.md states, byte by byte, in Python's integers."""
    stream = hashlib.shake_256(b"rlctl keyed digest 1" + key).digest(BLOCK * LANES + LANES * 16 + 16)
    small = [[(stream[c * LANES + lane] & 127) - 64 for lane in range(LANES)] for c in range(BLOCK)]
    large = stream[BLOCK * LANES :]
    words = [int.from_bytes(large[8 * at : 8 * at + 8], "little") for at in range(2 * LANES + 2)]

    def mixed(number: int) -> int:
        number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 % WORD
        number = (number ^ number >> 27) * 0x94D049BB133111EB % WORD
        return number ^ number >> 31

    width = (full.shape[-1] if full.shape else 1) * full.itemsize
    data = full.contiguous().reshape(-1).view(torch.int8).tolist()
    blocks = -(-width // BLOCK)
    total = [0, 0]
    for row, block in itertools.product(range(len(data) // width if width else 0), range(blocks)):
        columns = range(block * BLOCK, min(width, (block + 1) * BLOCK))
        products = [sum(small[c % BLOCK][lane] * data[row * width + c] for c in columns) for lane in range(LANES)]
        for j in range(2):
            line = mixed((words[2 * LANES + j] + (row * blocks + block + 1) * 0x9E3779B97F4A7C15) % WORD)
            total[j] += line * sum(words[2 * lane + j] * products[lane] for lane in range(LANES))
    return Sum.of(*total)


def whole(full: torch.Tensor, key: bytes = KEY) -> Sum:
    (found,) = keyed_sums(key, [Shard(TensorMeta("w", full.dtype, tuple(full.shape)), full)])
    return found


@pytest.mark.parametrize(("shape", "dtype"), CASES, ids=str)
def test_it_is_the_sum_that_is_stated(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    full = made(shape, dtype)
    assert whole(full) == by_the_formula(KEY, full)


def test_it_is_the_same_as_ever() -> None:
    full = torch.arange(24, dtype=torch.bfloat16).reshape(4, 6)
    assert whole(full).hex() == "cd1cc9bb57ea836866d41168b3de5e8e"
    assert tensor_digest("w", full, key=KEY) == "e0aacc04cf0905a8ab03615c3ad7ecdd"
    digest = ModelDigest(KEY)
    digest.add("w", full)
    digest.add("b", torch.ones(3))
    assert (
        digest.digest()
        == "6988f608566fd376830e76773aba8462c832a222f1ec51d58492d749d061163b@000102030405060708090a0b0c0d0e0f"
    )


@pytest.mark.parametrize(("shape", "dtype"), CASES, ids=str)
def test_parts_add_up_to_the_whole_however_it_is_cut(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    full, chance = made(shape, dtype), random.Random(3)
    meta = TensorMeta("w", dtype, shape)
    for dim, length in enumerate(shape):
        cuts = sorted({0, length, *(chance.randint(0, length) for _ in range(3))})
        parts = [Slice(dim, start, stop - start) for start, stop in itertools.pairwise(cuts)]
        sums = keyed_sums(KEY, [Shard(meta, part.of(full), part) for part in parts])
        assert sum(sums, Sum()) == whole(full), f"cut along {dim} at {cuts}"


def test_what_is_held_in_another_dtype_is_digested_in_the_references() -> None:
    full = made((6, 8), torch.bfloat16)
    held = Shard(TensorMeta("w", torch.bfloat16, (6, 8)), full.to(torch.float32))
    assert keyed_sums(KEY, [held]) == [whole(full)]
    assert tensor_digest("w", full.float(), dtype=torch.bfloat16, key=KEY) == tensor_digest("w", full, key=KEY)


def test_memory_of_any_layout_is_digested_as_its_values() -> None:
    full = made((6, 8), torch.bfloat16)
    for same in (full.t().contiguous().t(), torch.cat([full, full], 1)[:, :8], full.clone().requires_grad_()):
        assert whole(same) == whole(full)
    column, row = made((8, 1), torch.bfloat16), made((1, 4096), torch.float32)
    imaginary = torch.randn(3, 4, dtype=torch.complex64)
    for same in (
        row.expand(2048, 4096),
        column.expand(8, 5),
        torch.arange(9.0).unfold(0, 4, 1),
        made((3, 8), torch.bfloat16).unsqueeze(1).expand(3, 4, 8),
        made((8,), torch.float32).expand(5, 8),
        full[3:4].t(),
        made((1, 1, 5), torch.float32).transpose(1, 2),
        imaginary.conj(),
        torch._neg_view(full),
    ):
        assert whole(same) == whole(same.clone(memory_format=torch.contiguous_format).resolve_conj().resolve_neg())


def test_memory_that_is_no_matrix_is_read_where_it_lies() -> None:
    full = made((3, 4, 5, 6), torch.bfloat16)
    for order in itertools.permutations(range(4)):
        back = [order.index(dim) for dim in range(4)]
        same = full.permute(order).contiguous().permute(back)
        assert sum(len(matrix) for _, matrix in keyed_digest._matrices(same)) == 60
        addresses = {same.untyped_storage().data_ptr()}
        held = {matrix.untyped_storage().data_ptr() for _, matrix in keyed_digest._matrices(same)}
        assert held == addresses
        assert whole(same) == whole(full)
        part = Slice(1, 1, 2)
        meta = TensorMeta("w", torch.bfloat16, (3, 4, 5, 6))
        assert keyed_sums(KEY, [Shard(meta, part.of(same), part)]) == keyed_sums(
            KEY, [Shard(meta, part.of(full), part)]
        )


def test_many_tensors_are_digested_as_each_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks and batches of any size, on any number of threads."""
    tensors = {f"t{index}": made(shape, dtype, index) for index, (shape, dtype) in enumerate(CASES * 3)}
    alone = {name: tensor_digest(name, tensor, key=KEY) for name, tensor in tensors.items()}
    for chunk, batch, cores in ((1, 1, 4), (100, 1000, 3), (4 << 20, 16 << 20, 1)):
        monkeypatch.setattr(keyed_digest, "_CPU_BYTES", (chunk, batch))
        monkeypatch.setattr(keyed_digest, "usable_cores", lambda cores=cores: cores * torch.get_num_threads())
        found = tensor_digests({name: (tensor, tensor.dtype) for name, tensor in tensors.items()}, key=KEY)
        assert found == alone


def test_a_batch_that_needs_too_much_memory_is_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {f"t{index}": made(shape, dtype, index) for index, (shape, dtype) in enumerate(CASES)}
    contents = {name: (tensor, tensor.dtype) for name, tensor in tensors.items()}
    right = tensor_digests(contents, key=KEY)
    digest, most = keyed_digest._digest, max(tensor.nbytes for tensor in tensors.values()) // 3
    refused: list[int] = []

    def limited(keys: keyed_digest._Keys, batch: Sequence[keyed_digest._Rows]) -> dict[int, Sum]:
        nbytes = sum(rows.values.nbytes for rows in batch)
        if nbytes > most and (len(batch) > 1 or len(batch[0].values) > 1):
            refused.append(nbytes)
            raise torch.OutOfMemoryError("no memory")
        return digest(keys, batch)

    monkeypatch.setattr(keyed_digest, "_digest", limited)
    assert tensor_digests(contents, key=KEY) == right
    assert len(refused) > 2


def test_a_row_that_needs_too_much_memory_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(keys: keyed_digest._Keys, batch: Sequence[keyed_digest._Rows]) -> dict[int, Sum]:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(keyed_digest, "_digest", fail)
    with pytest.raises(torch.OutOfMemoryError):
        whole(made((6, 10), torch.bfloat16))


def test_the_name_the_dtype_and_the_shape_count() -> None:
    full = torch.zeros(4, 6)
    others = [("v", full), ("w", full.to(torch.int32)), ("w", full.reshape(6, 4)), ("w", full.reshape(24))]
    assert tensor_digest("w", full, key=KEY) not in {tensor_digest(name, other, key=KEY) for name, other in others}


def test_every_flipped_bit_of_a_small_model_is_seen() -> None:
    model = [made((6, 10), torch.bfloat16), made((7,), torch.float32), made((2, 3, 4), torch.float16)]
    for full in model:
        right, data = whole(full), as_bytes(full)
        for at, bit in itertools.product(range(len(data)), range(8)):
            data[at] ^= 1 << bit
            assert whole(full) != right, f"bit {bit} of byte {at}"
            data[at] ^= 1 << bit
        assert whole(full) == right


def test_everything_that_is_swapped_or_shifted_is_seen() -> None:
    full = made((6, 10), torch.bfloat16)
    right = whole(full)
    wrong = [full[list(order)] for order in itertools.permutations(range(6)) if list(order) != list(range(6))]
    wrong += [full.index_select(1, torch.randperm(10, generator=torch.Generator().manual_seed(n))) for n in range(200)]
    wrong += [full.roll(shift, dim) for dim in (0, 1) for shift in range(1, full.shape[dim])]
    assert all(whole(other) != right for other in wrong if not torch.equal(other, full))
    # Two tensors of one shape, each under the other's name.
    first, second = made((4, 4), torch.float32, 1), made((4, 4), torch.float32, 2)
    assert tensor_digest("a", first, key=KEY) != tensor_digest("a", second, key=KEY)


@pytest.mark.parametrize("dim", [0, 1])
def test_a_part_at_a_wrong_place_is_seen(dim: int) -> None:
    full = made((6, 10), torch.bfloat16)
    meta, part = TensorMeta("w", torch.bfloat16, (6, 10)), Slice(dim, 2, 3)
    (right,) = keyed_sums(KEY, [Shard(meta, part.of(full), part)])
    for start in range(full.shape[dim] - 2):
        (found,) = keyed_sums(KEY, [Shard(meta, Slice(dim, start, 3).of(full), part)])
        assert (found == right) == (start == 2)
        (elsewhere,) = keyed_sums(KEY, [Shard(meta, part.of(full), Slice(dim, start, 3))])
        assert (elsewhere == right) == (start == 2)


def test_a_whole_part_is_digested_as_its_tensor() -> None:
    full = made((6, 10), torch.bfloat16)
    meta = TensorMeta("w", torch.bfloat16, (6, 10))
    assert part_digest(Shard(meta, full), KEY) == tensor_digest("w", full, key=KEY)
    assert part_digest(Shard(meta, full, Slice(1, 0, 10)), KEY) == tensor_digest("w", full, key=KEY)
    assert part_digest(Shard(meta, full[:3], Slice(0, 0, 3))) == tensor_digest("w", full[:3])


@pytest.mark.parametrize("bit", [0, 7])
def test_contents_that_differ_agree_as_seldom_as_is_derived(bit: int) -> None:
    """Over words of 8 bits, where agreement can be counted: the low bytes of the words are the digest modulo 2^8.

    Bytes that differ by 2^v agree in one word of w bits with a chance of ((w - v) / 2 + 1) / 2^(w - v).
    """
    full = torch.zeros(2, 3, dtype=torch.uint8)
    other = full.clone()
    other[1, 1] = 1 << bit
    keys, agreed = 2000, [0, 0]
    for number in range(keys):
        key = hashlib.md5(b"%d" % number).digest()
        pairs = zip(whole(full, key).words, whole(other, key).words, strict=True)
        for word, (first, second) in enumerate(pairs):
            agreed[word] += first % 256 == second % 256
    left = 8 - bit
    derived = min(1.0, (left / 2 + 1) / 2**left)
    for count in agreed:
        assert abs(count / keys - derived) < 4 * (derived * (1 - derived) / keys) ** 0.5 + 1 / keys


def test_another_key_gives_another_digest() -> None:
    full = made((6, 10), torch.bfloat16)
    keys = [bytes([number]) * 16 for number in range(50)]
    assert len({whole(full, key) for key in keys}) == 50


def test_both_products_are_exact() -> None:
    generator = torch.Generator().manual_seed(5)
    for rows, columns in ((1, 1), (1, BLOCK), (17, 3), (33, 4097), (300, 2049)):
        data = torch.randint(-128, 128, (rows, columns), dtype=torch.int8, generator=generator)
        keys = torch.randint(-64, 64, (columns, LANES), dtype=torch.int8, generator=generator)
        data[0], keys[:, 0], keys[:, 1] = -128, -64, 63
        right = data.to(torch.int64) @ keys.to(torch.int64)
        for product in (keyed_digest._int8_product, keyed_digest._float_product):
            assert torch.equal(product(data, keys).to(torch.int64), right)


def test_a_cpu_without_int8_instructions_multiplies_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(data: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02)
        return torch._int_mm(data, keys)

    monkeypatch.setattr(keyed_digest, "_int8_product", slow)
    chosen: Callable[[torch.device], object] = keyed_digest._product_on.__wrapped__
    assert chosen(torch.device("cpu")) is keyed_digest._float_product


@pytest.mark.parametrize("broken", ["raises", "wrong"])
def test_a_product_that_this_torch_cannot_compute_is_replaced(monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    def product(data: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        if broken == "raises":
            raise RuntimeError("no int8 here")
        return (data.to(torch.int64) @ keys.to(torch.int64)).clamp(-(2**15), 2**15).to(torch.int32)

    full = made((6, 10), torch.bfloat16)
    right = whole(full)
    monkeypatch.setattr(keyed_digest, "_int8_product", product)
    chosen: Callable[[torch.device], object] = keyed_digest._product_on.__wrapped__
    assert chosen(torch.device("cpu")) is keyed_digest._float_product
    monkeypatch.setattr(keyed_digest, "_product_on", lambda _: keyed_digest._float_product)
    assert whole(full) == right


@pytest.mark.parametrize("broken", ["", "raises", "wrong"])
def test_a_device_that_digests_samples_wrongly_is_replaced_by_the_cpu(
    monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """Each second digest is that of the device."""
    digest, calls = keyed_digest._digest, itertools.count(1)

    def on_device(keys: keyed_digest._Keys, batch: Sequence[keyed_digest._Rows]) -> dict[int, Sum]:
        if next(calls) % 2 or not broken:
            return digest(keys, batch)
        if broken == "raises":
            raise RuntimeError("not implemented for 'Long'")
        return {index: each + Sum((1, 0)) for index, each in digest(keys, batch).items()}

    monkeypatch.setattr(keyed_digest, "_digest", on_device)
    is_exact: Callable[[torch.device], bool] = keyed_digest._is_exact_on.__wrapped__
    assert is_exact(torch.device("cpu")) == (not broken)
    monkeypatch.setattr(keyed_digest, "_is_exact_on", lambda _: not broken)
    assert keyed_digest._device_for(torch.device("cuda")).type == ("cpu" if broken else "cuda")


def test_torchs_defaults_do_not_matter() -> None:
    """An engine sets its own while it runs."""
    full = made((6, 10), torch.bfloat16)
    right = whole(full)
    keyed_digest._product_on.cache_clear()
    keyed_digest._keys.cache_clear()
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.bfloat16)
        with torch.device("meta"), torch.inference_mode():
            assert whole(full) == right
    finally:
        torch.set_default_dtype(before)


def test_it_ends_when_it_is_told_to() -> None:
    stop = Stop()
    stop.set(Reason.CANCELLED.error("enough"))
    with pytest.raises(RlctlError, match="enough"):
        keyed_sums(KEY, [Shard(TensorMeta("w", torch.float32, (4, 4)), torch.zeros(4, 4))], stop)
