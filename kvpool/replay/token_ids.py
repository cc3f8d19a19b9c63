"""Token ids for a request that a trace knows by hash ids, the same in every process.

A token is an affine function of its hash id and of its position in the block, modulo 2^31. For a
fixed position this is a bijection of the id, so two different ids below 2^31 differ in *every*
token and equal ids in none: at any page size the tree finds exactly the sharing that the trace
states. (Of larger ids a second term takes the upper bits; two of them meet in a token with a
probability of 2^-31 a position.)

A made-up answer is such a function of the request's number and the position, with the sign bit
set. It equals no prompt and no other answer: it takes room in the pool, and nothing ever hits it.
What a trace says of the answer in the next prompt of the conversation is a hash id of its own.

Other tools draw other token values from the same ids; which of them are equal is the same.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvpool.replay.lines import HashedPrompt, TraceRequest

_MASK = np.uint32(0x7FFF_FFFF)
_ID_STEP, _ANSWER_STEP, _POSITION_STEP = 0x9E37_79B1, 0x85EB_CA6B, 0xC2B2_AE35  # odd: bijections


class TokenWriter:
    """Writes the tokens of requests.

    Parameters
    ----------
    block_size : int
        Tokens of one hash id.
    """

    def __init__(self, block_size: int) -> None:
        positions = np.arange(block_size, dtype=np.uint64)
        self._offsets = _scrambled(positions + np.uint64(1))
        self._high_steps = _scrambled(positions + np.uint64(block_size + 1)) | np.uint32(1)

    def tokens(self, index: int, request: TraceRequest, prompts_only: bool) -> NDArray[np.int32]:
        """Prompt and output, and one place more: int32 ``[num_tokens + 1]``.

        The last place has no defined value: a caller may look up a prompt that is one token longer
        than what there is, and no page of it reaches that far.

        Parameters
        ----------
        index : int
            Number of the request, which makes its answer its own.
        request : TraceRequest
            What to write.
        prompts_only : bool
            Leave the output out.
        """
        start, end = request.prompt_len, request.num_tokens(prompts_only)
        prompt = request.prompt
        if isinstance(prompt, HashedPrompt):
            num_blocks = len(prompt.hash_ids)
            out = np.empty(max(num_blocks * prompt.block_size, end + 1), np.int32)
            blocks = out[: num_blocks * prompt.block_size].reshape(num_blocks, prompt.block_size)
            self._write_blocks(prompt.hash_ids, blocks.view(np.uint32))
            out = out[: end + 1]
        else:
            out = np.empty(end + 1, np.int32)
            out[:start] = prompt.tokens
        if request.output_tokens is not None:
            out[start:end] = request.output_tokens[: end - start]
        else:
            _write_answer(index, out[start:end])
        return out

    def _write_blocks(self, hash_ids: NDArray[np.int64], out: NDArray[np.uint32]) -> None:
        low = (hash_ids & np.int64(_MASK)).astype(np.uint32) * np.uint32(_ID_STEP)
        np.add(low[:, None], self._offsets, out=out)
        high = hash_ids >> 31
        if high.any():
            # 0 scrambles to 0: ids below 2^31 are the same beside larger ones.
            out += _scrambled(high.view(np.uint64))[:, None] * self._high_steps
        np.bitwise_and(out, _MASK, out=out)


def _write_answer(index: int, out: NDArray[np.int32]) -> None:
    bits = out.view(np.uint32)
    positions = np.arange(out.size, dtype=np.uint32)
    np.multiply(positions, np.uint32(_POSITION_STEP), out=bits)
    bits += np.uint32(index * _ANSWER_STEP & 0xFFFF_FFFF)
    bits |= ~_MASK


def _scrambled(values: NDArray[np.uint64]) -> NDArray[np.uint32]:
    """The finaliser of splitmix64, its upper half; a bijection of 64 bits, and 0 stays 0."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58_476D_1CE4_E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D0_49BB_1331_11EB)
    return ((values ^ (values >> np.uint64(31))) >> np.uint64(32)).astype(np.uint32)
