"""Generation by the model itself: its own linears, quantisers and rotary embedding, with a cache of keys and values.

    while prompts wait or sequences are alive:
        prefill the prompts that there is room for, packed, or decode one token of every live sequence
        choose a token each; sequences that end leave the batch, and prompts that wait take their place

What a recipe quantises in a forward is quantised here. Where scales belong to a token's own block (1x128, a row) a
sequence does not depend on its neighbours but for the order of sums; with one scale for a whole tensor it does.
Nothing of a training run is changed: no gradient, amax history, count or random state. Weights that are quantised on
the way are those that the next training step uses.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import torch
from torch import Tensor

from ..data.batch import Batch
from ..errors import InputError
from ..ops.dispatch import fast
from ..ops.reference.loss import Head, float_logits
from .cache import Cache
from .decoder import Decoder

PREFILL = 1 << 15  # tokens of one prefill, unless a single prompt is longer
ALIGNED = 128  # tokens that the FP8 kernels want a multiple of

Finish = Literal["stop", "length"]


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen, and how many.

    Temperature divides the logits, then the `top_k` most likely tokens are kept (0: all), then of these the fewest
    whose probabilities sum to `top_p`. Temperature 0 takes the most likely token and looks at nothing else.

    Raises:
        InputError: a value that makes no sense, named as the command line's flag.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        for holds, flag, wanted, usual in (
            (self.max_new_tokens >= 1, "max_new_tokens", "at least 1", "256"),
            (0 <= self.temperature < float("inf"), "temperature", "0 (greedy) or above", "0, or 0.8 for draws"),
            (0 < self.top_p <= 1, "top_p", "above 0 and at most 1", "0.95, or 1 for all tokens"),
            (self.top_k >= 0, "top_k", "0 (all tokens) or above", "50, or 0 for all tokens"),
        ):
            if not holds:
                name = "--" + flag.replace("_", "-")
                raise InputError(f"{flag} is {getattr(self, flag)}, it must be {wanted}", name, f"{name} {usual}")


@dataclass(frozen=True)
class Token:
    """One token as it comes: of which prompt, its log-probability (see `Generation`), and whether it is the last."""

    prompt: int
    token: int
    logprob: float
    finish: Finish | None


@dataclass(frozen=True)
class Generation:
    """What followed a prompt.

    Attributes:
        tokens: the token that ended it included.
        logprobs: float32 natural logarithms of each token's probability at the sampling temperature (1 for greedy),
            *before* top-k and top-p: what a policy gradient of the sampled distribution needs without truncation.
        finish: `stop` at an end token, `length` at the limit on tokens or the model's last position.
    """

    tokens: list[int]
    logprobs: list[float]
    finish: Finish


@dataclass(eq=False)
class _Row:
    """A live sequence: its prompt's number, its last token, how many tokens it may still get, its random numbers."""

    prompt: int
    left: int
    random: random.Random
    last: int = -1


class Generator:
    """Continues prompts with a model as it stands at each call.

    Args:
        model: any `Decoder`, in training or not.
        eos_ids: tokens that end a sequence.
        batch: sequences that are computed at once.
    """

    def __init__(self, model: Decoder, eos_ids: Collection[int], batch: int = 16) -> None:
        if batch < 1:
            raise ValueError(f"a batch of {batch} sequences")
        self.model, self.eos_ids, self.batch = model, frozenset(eos_ids), batch

    def generate(self, prompts: Sequence[Sequence[int]], settings: Sampling) -> list[Generation]:
        """What follows each prompt; arguments and errors as `stream`."""
        made: list[list[Token]] = [[] for _ in prompts]
        for token in self.stream(prompts, settings):
            made[token.prompt].append(token)
        return [
            Generation([t.token for t in one], [t.logprob for t in one], one[-1].finish or "length") for one in made
        ]

    def stream(self, prompts: Sequence[Sequence[int]], settings: Sampling) -> Iterator[Token]:
        """Tokens of all prompts as they come, those of one prompt in order; the model must not change meanwhile.

        A prompt's random numbers follow from the seed and its place in `prompts` alone.

        Raises:
            InputError: a prompt that is empty, has an id outside the vocabulary or leaves no position for a token.
        """
        limit = self.model.shape.max_positions
        self._check(prompts)
        waiting, rows = deque(range(len(prompts))), list[_Row]()
        device = self.model.embed.device
        cache = Cache(self.model.shape, min(self.batch, len(prompts)), self.model.dtype, device)
        head = self._head()
        while waiting or rows:
            fresh: list[Sequence[int]] = []
            while waiting and len(rows) < self.batch:
                prompt = prompts[waiting[0]]
                if fresh and sum(map(len, fresh)) + len(prompt) > PREFILL:
                    break
                fresh.append(prompt)
                left = min(settings.max_new_tokens, limit - len(prompt))
                rows.append(_Row(waiting[0], left, random.Random(f"{settings.seed} {waiting.popleft()}")))
            live = rows[-len(fresh) :] if fresh else rows
            hidden = self._prefill(cache, fresh) if fresh else self._decode(cache, [row.last for row in rows])
            chosen = self._choose(hidden, head, [row.random for row in live], settings)
            ended = []
            for row, (token, logprob) in zip(live, chosen, strict=True):
                row.last, row.left = token, row.left - 1
                finish: Finish | None = "stop" if token in self.eos_ids else None if row.left else "length"
                if finish is not None:
                    ended.append(row)
                yield Token(row.prompt, token, logprob, finish)
            for row in ended:
                place = rows.index(row)
                cache.drop(place)
                rows[place] = rows[-1]
                rows.pop()

    def _check(self, prompts: Sequence[Sequence[int]]) -> None:
        shape = self.model.shape
        for number, prompt in enumerate(prompts, 1):
            where = f"prompt {number}"
            if not prompt:
                raise InputError("the prompt has no tokens", where, "give it some text")
            if outside := next((i for i in prompt if not 0 <= i < shape.vocab), None):
                what = f"token id {outside} is outside the model's vocabulary of {shape.vocab}"
                raise InputError(what, where, "use the tokenizer that the model was trained with")
            if len(prompt) >= shape.max_positions:
                what = f"the prompt has {len(prompt)} tokens, the model {shape.max_positions} positions"
                raise InputError(what, where, "shorten it: at least one position must be left")

    @torch.no_grad()
    def _head(self) -> Head:
        return self.model.reading_head()

    @torch.no_grad()
    def _prefill(self, cache: Cache, prompts: list[Sequence[int]]) -> Tensor:
        """Hidden states of the last token of each prompt, [prompts, D]."""
        lengths = [len(prompt) for prompt in prompts]
        tokens = [token for prompt in prompts for token in prompt]
        positions = [position for length in lengths for position in range(length)]
        padding = self._padding(len(tokens))
        if padding:  # a sequence of its own, that nothing is kept of
            tokens, positions = tokens + tokens[:1] * padding, positions + list(range(padding))
        attentions = cache.prefill(lengths)
        batch = self._batch(tokens, positions, (*lengths, padding) if padding else tuple(lengths))
        ends = torch.tensor([end - 1 for end in accumulate(lengths)])
        return self.model.hidden(batch, attentions)[ends.to(batch.tokens_T.device)]

    @torch.no_grad()
    def _decode(self, cache: Cache, tokens: list[int]) -> Tensor:
        """Hidden states after one more token of each row, [rows, D]."""
        count, positions, padding = len(tokens), list(cache.lengths), self._padding(len(tokens))
        batch = self._batch(
            tokens + tokens[:1] * padding, positions + positions[:1] * padding, (1,) * (count + padding)
        )
        return self.model.hidden(batch, cache.decode())[:count]

    def _padding(self, tokens: int) -> int:
        """Tokens to add so that FP8 kernels can run: without them weights would be decoded again at each step."""
        return -tokens % ALIGNED if self.model.recipe.uses_fp8 and fast(self.model.embed) else 0

    def _batch(self, tokens: list[int], positions: list[int], lengths: tuple[int, ...]) -> Batch:
        tokens_T, positions_T = torch.tensor(tokens), torch.tensor(positions)
        return Batch(tokens_T, tokens_T, torch.zeros(len(tokens)), positions_T, lengths).to(self.model.embed.device)

    @torch.no_grad()
    def _choose(
        self, hidden: Tensor, head: Head, randoms: list[random.Random], settings: Sampling
    ) -> list[tuple[int, float]]:
        logits = float_logits(hidden, head)
        if settings.temperature == 0:
            tokens, logprobs = greedy(logits)
        else:
            uniform = torch.tensor([r.random() for r in randoms], dtype=torch.float64).to(logits.device)
            tokens, logprobs = sample(logits, uniform, settings)
        ids, values = torch.stack([tokens.double(), logprobs.double()]).tolist()  # one wait for the device
        return [(int(token), value) for token, value in zip(ids, values, strict=True)]


def greedy(logits_BV: Tensor) -> tuple[Tensor, Tensor]:
    """The most likely token of each row, int64 [B], and its log-probability, float32 [B]."""
    tokens = logits_BV.argmax(-1)
    return tokens, torch.log_softmax(logits_BV, -1).gather(1, tokens[:, None])[:, 0]


def sample(logits_BV: Tensor, uniform_B: Tensor, settings: Sampling) -> tuple[Tensor, Tensor]:
    """A token of each row by inversion of its truncated distribution function.

    Args:
        logits_BV: float32.
        uniform_B: float64 numbers in [0, 1), one a row.
        settings: temperature, which must be above 0, top_p and top_k.

    Returns:
        int64 [B], and float32 [B] log-probabilities at the temperature, before truncation.
    """
    # The largest becomes 0 beforehand, and the divisor stays above 0 in float32, so that no temperature is too low.
    lower = logits_BV - logits_BV.amax(-1, keepdim=True)
    logprobs = torch.log_softmax(lower / max(settings.temperature, 1e-37), -1)
    weights, order = logprobs.double().exp(), None
    if settings.top_k or settings.top_p < 1:
        weights, order = weights.sort(dim=-1, descending=True, stable=True)
        if settings.top_k:
            weights[:, settings.top_k :] = 0
        if settings.top_p < 1:
            before = weights.cumsum(-1) - weights
            weights = weights.masked_fill(before >= settings.top_p * weights.sum(-1, keepdim=True), 0)
    below = weights.cumsum(-1)
    # Below the sum even when rounding would reach it; a token of weight 0 is never the first above it.
    point = torch.minimum(uniform_B * below[:, -1], below[:, -1].nextafter(torch.zeros_like(uniform_B)))
    tokens = torch.searchsorted(below, point[:, None], right=True).clamp(max=logits_BV.shape[1] - 1)
    if order is not None:
        tokens = order.gather(1, tokens)
    return tokens[:, 0], logprobs.gather(1, tokens)[:, 0]
