"""Prove that training's forward pass equals transformers' own forward pass, on the recipe's model at toy size.

Training changes a forward pass: documents share a row, the loss comes in chunks, blocks are checkpointed, and attention
and activations use other kernels. Whether the result stays exact depends on the model's layers. Before any data is
read, a probe compares it with transformers' own forward pass of each document alone, on a CPU in fp32.
"""

import inspect
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from accel_train.core.errors import SettingError
from accel_train.core.files import write_atomically
from accel_train.core.json_io import json_digest
from accel_train.core.state import Choice, Choices
from accel_train.data.cache import cache_root, read_json
from accel_train.data.text.tokens import collate_windows
from accel_train.model import activation_checkpointing
from accel_train.model.activation_checkpointing import checkpoint_activations
from accel_train.model.isolation import isolated
from accel_train.model.kernels import activations, attention, chunked_loss, documents
from accel_train.model.kernels.toy import in_words, toy_model
from accel_train.model.pretrained import quiet_bars, transformers_model
from accel_train.recipe.schema import Recipe
from accel_train.tasks.causal_lm.config import CausalLMData
from accel_train.tasks.causal_lm.packing import PackedRows, TokenRows, can_keep_rows_apart, collate_packed, pack

SAME = 1e-5
"""Largest difference that counts as rounding, as a share of the largest logit, loss, or gradient."""
LONGEST = 256
"""Maximum tokens of a probe's windows. From this length on, a CPU attends to each document separately."""
MOST_ROUNDING = 1e-4
"""Upper limit for the rounding of a model whose own forward pass rounds a lot. Leaks are 1e-1 and larger."""
DOCUMENTS, CAP, ROWS, FORWARD, CHUNKED, CHECKPOINTING = CHECKS = (
    "packed documents", "logit cap", "packed rows", "forward", "chunked loss", "checkpointing"
)  # fmt: skip
SOFTCAP = "final_logit_softcapping"
"""Field of a transformers configuration: the cap of the logits, applied as cap * tanh(logits / cap)."""

Batch = Mapping[str, Any]
Compute = Callable[[nn.Module, Batch, bool], Tensor]


class Forward(NamedTuple):
    """The functions that training computes with, provided by the task."""

    attention_arguments: Callable[[Recipe, PreTrainedConfig], dict[str, str]]
    logits: Compute
    hidden_states: Compute
    loss_sum: Callable[..., Tensor]


@dataclass(frozen=True)
class Proof:
    """The measurements of a probe, by check."""

    model: str
    """Class of the model; of a model that could not be built, its type."""
    differences: Mapping[str, float]
    """Largest difference by check, as a share of the largest value. Omits checks that training does not use."""
    refused: Mapping[str, str]
    """Reason by check, for checks that could not be computed."""
    layer: str | None = None
    """Type of the layer that carries values from one document to the next. None if unknown or if nothing leaks."""
    rounding: float = SAME
    """Largest difference that counts as rounding in this model."""
    looks_ahead: bool = False
    """Whether a later token changes the logits before it in transformers' own forward pass."""
    num_parameters: int = 0
    """Number of parameters of the probed model."""

    def holds(self, check: str) -> bool:
        """Return whether the check was computed and its difference is within rounding."""
        return self.differences.get(check, np.inf) <= self.rounding

    @property
    def has_passed(self) -> bool:
        """Return whether every check was computed and holds."""
        return not self.refused and all(map(self.holds, self.differences))


def checks_of(recipe: Recipe, config: PreTrainedConfig) -> list[str]:
    """Return the checks that a run of this recipe needs. Empty if tests already cover them for the model type."""
    data, text = CausalLMData.of(recipe.data), config.get_text_config()
    positions = data.sequence_length * (recipe.batch.global_batch_size or 1)
    is_large = positions * (getattr(text, "vocab_size", None) or 0) > chunked_loss.LOGITS_AT_ONCE
    chunks = recipe.loss.chunked is True or (recipe.loss.chunked == "auto" and is_large)
    wanted = {
        DOCUMENTS: data.format == "text" and data.mask_documents,
        CAP: recipe.loss.logit_softcap is not None,
        ROWS: data.format != "text",
        CHUNKED: chunks,
        CHECKPOINTING: recipe.precision.recomputed not in ("nothing", "budget"),
    }
    checks = [check for check, is_wanted in wanted.items() if is_wanted]
    is_known = text.model_type in attention._CHECKED_MODEL_TYPES
    return checks if is_known and not checks else [FORWARD, *checks]


def prove(recipe: Recipe, config: PreTrainedConfig, forward: Forward) -> Choices:
    """Return the result of the probe for the run log, or nothing if no check is needed.

    Raises:
        SettingError: training's result differs from transformers' own. It names the setting and the fix.
    """
    checks = checks_of(recipe, config)
    if not checks:
        return {}
    # This raises for errors that the configuration alone shows.
    forward.attention_arguments(recipe, config)
    proof = _remembered(recipe, config, checks, forward)
    if not proof.has_passed:
        problem = _problem(recipe, config, proof)
        if problem is not None:
            raise problem
        return {"probe": Choice("not proved", "; ".join(sorted(set(proof.refused.values()))))}
    found = ", ".join(f"{check} {difference:.0e}" for check, difference in proof.differences.items())
    return {
        "probe": Choice(
            "equal",
            f"to transformers' own forward: {found}; shown on {proof.model}, {proof.num_parameters:,} parameters",
        )
    }


def _problem(recipe: Recipe, config: PreTrainedConfig, proof: Proof) -> SettingError | None:
    """Return the error for the first check that fails, or None if no check could be computed."""
    kind = proof.model

    def how(check: str) -> str:
        if check in proof.refused:
            return f"it cannot be computed ({proof.refused[check]})"
        return f"the difference is {proof.differences[check]:.1e} of the largest value"

    if proof.looks_ahead:
        return SettingError(
            f"a later token changes the logits before it. {kind} sees the token that it predicts",
            "Use a causal model, or set is_decoder: true in model.config",
            at=f"model type {config.model_type}",
        )
    failed = [check for check in CHECKS if check in {*proof.refused, *proof.differences} and not proof.holds(check)]
    if DOCUMENTS in failed:
        carries = (
            f"{proof.layer} carries values from one document to the next"
            if proof.layer
            else f"{kind} does not keep documents apart"
        )
        return SettingError(
            f"{carries} ({how(DOCUMENTS)})",
            "Set data.mask_documents to false",
            at="data.mask_documents=True",
            settings=("data.mask_documents",),
        )
    if CAP in failed:
        return SettingError(
            f"{kind} does not apply the {SOFTCAP} of its configuration ({how(CAP)})",
            "Leave the cap out, or use a model that applies it, for example gemma2",
            at=f"loss.logit_softcap={recipe.loss.logit_softcap:g}",
            settings=("loss.logit_softcap",),
        )
    if set(failed) <= set(proof.refused) and len(set(proof.refused.values())) == 1 and FORWARD in failed:
        return None
    at, what, remedy = {
        ROWS: (
            f"data.format={CausalLMData.of(recipe.data).format}",
            f"rows that share a window change each other in {kind}",
            "Set model.attn_implementation to eager; then each row is a separate sample",
        ),
        FORWARD: (
            f"model type {config.model_type}",
            f"training's forward of {kind} is not transformers' own",
            "Set model.fused_kernels to false and model.attn_implementation to eager",
        ),
        CHUNKED: (f"loss.chunked={recipe.loss.chunked}", kind, "Set loss.chunked to false"),
        CHECKPOINTING: (
            f"precision.gradient_checkpointing={recipe.precision.recomputed}",
            kind,
            "Set precision.gradient_checkpointing to off",
        ),
    }[failed[0]]
    return SettingError(f"{what}: {how(failed[0])}", remedy, at)


def examine(recipe: Recipe, config: PreTrainedConfig, forward: Forward, checks: Sequence[str]) -> Proof:
    """Compute the checks on a toy-size model of this configuration. The random state is restored afterwards."""
    with (
        isolated(nn.Module(), torch.device("cpu")),
        # Warnings of transformers and torch are about the toy model.
        quiet_bars(reports=False),
        warnings.catch_warnings(action="ignore"),
        torch.device("cpu"),
        torch.enable_grad(),
    ):
        proof = _examine(recipe, config, forward, checks, seed=0)
        if proof.has_passed or not proof.differences:
            return proof
        # Rounding can route a token to another expert. The check then passes with other weights, but a leak never does.
        second = _examine(recipe, config, forward, checks, seed=1)
        return second if second.has_passed else proof


def _examine(recipe: Recipe, config: PreTrainedConfig, forward: Forward, checks: Sequence[str], seed: int) -> Proof:
    torch.default_generator.manual_seed(seed)
    try:
        stock = toy_model(config, trust_remote_code=recipe.model.trust_remote_code)
    except ValueError as error:
        return Proof(config.model_type, {}, dict.fromkeys(checks, str(error)))
    proof = Proof(type(stock).__name__, {}, {}, num_parameters=stock.num_parameters())
    section = recipe.model.model_copy(update={"pretrained": None, "lora": None})
    toy = recipe.model_copy(update={"model": section})
    try:
        arguments = forward.attention_arguments(toy, stock.config)
        trained, _ = transformers_model(
            AutoModelForCausalLM, toy, deepcopy(stock.config), arguments, takes_new_head=False
        )
        trained.load_state_dict(stock.state_dict())
    except Exception as error:
        return replace(proof, refused=dict.fromkeys(checks, in_words(error)))
    return _Probe(toy, forward, stock.eval(), trained.eval(), seed).measure(proof, checks)


class _Probe:
    """A toy model as transformers builds it and as training builds it, with equal weights, and documents for both."""

    def __init__(
        self, recipe: Recipe, forward: Forward, stock: PreTrainedModel, trained: PreTrainedModel, seed: int
    ) -> None:
        self.recipe, self.forward, self.stock, self.trained = recipe, forward, stock, trained
        # Whether the checks after `packed documents` also use packed documents.
        self.is_masked = False
        self.compiled = recipe.precision.compiles
        positions = getattr(stock.config.get_text_config(), "max_position_embeddings", None) or LONGEST
        length = self.length = min(CausalLMData.of(recipe.data).sequence_length, LONGEST, positions)
        vocabulary = stock.get_input_embeddings().num_embeddings
        cuts = ((0, length // 2, length // 2 + length // 3, length), (0, length // 4, length))
        tokens = np.random.default_rng(seed).integers(2, vocabulary, (len(cuts), length + 1))
        for row, ends in enumerate(cuts):
            # Token 1 is the separator.
            tokens[row, list(ends[:-1])] = 1
        self.tokens = tokens
        self.parts = [(row, *part) for row, ends in enumerate(cuts) for part in pairwise(ends)]
        self.parts = [part for part in self.parts if part[2] > part[1]]
        self.pieces = [tokens[row : row + 1, begin:end] for row, begin, end in self.parts]

    def measure(self, proof: Proof, checks: Sequence[str]) -> Proof:
        """Return `proof` with a difference per check, or the reason why a check could not be computed."""
        try:
            with torch.no_grad():
                alone = [_logits_of(self.stock, piece) for piece in self.pieces]
        except Exception as error:
            return replace(proof, refused=dict.fromkeys(checks, f"transformers' own forward fails: {in_words(error)}"))
        differences, refused = dict[str, float](), dict[str, str]()
        measures: dict[str, Callable[[], float | None]] = {
            DOCUMENTS: lambda: self._documents(alone),
            CAP: self._capped,
            ROWS: lambda: self._rows(alone),
            FORWARD: lambda: self._padded(alone),
            CHUNKED: self._chunked,
            CHECKPOINTING: self._checkpointing,
        }
        for check in checks:
            try:
                if (found := measures[check]()) is not None:
                    differences[check] = found
                self.is_masked = differences.get(DOCUMENTS, np.inf) <= SAME
            except Exception as error:
                refused[check] = in_words(error)
        proof = replace(proof, differences=differences, refused=refused)
        if proof.has_passed:
            return proof
        of_later, of_width = self._effect_of_later_tokens(alone), self._rounding(alone)
        rounding = min(max(SAME, 30 * max(of_later, of_width)), MOST_ROUNDING)
        proof = replace(proof, rounding=rounding, looks_ahead=of_later > MOST_ROUNDING)
        leaks = differences.get(DOCUMENTS, 0.0) > proof.rounding
        return replace(proof, layer=self._leaking_layer() if leaks else None)

    def _logits(self, batch: Batch) -> Tensor:
        with torch.no_grad():
            return self.forward.logits(self.trained, batch, self.compiled)

    def _batch(self, *, is_masked: bool) -> Batch:
        """Return a batch with several documents per row, masked as `data.mask_documents` does, or not masked."""
        return collate_windows(self.tokens, separator_id=1, mask_documents=is_masked)

    def _documents(self, alone: Sequence[Tensor]) -> float:
        logits = self._logits(self._batch(is_masked=True))
        return _largest_difference([logits[row : row + 1, begin:end] for row, begin, end in self.parts], alone)

    def _capped(self) -> float:
        """Return the difference between a model with a cap and the capped logits of a model with a huge cap."""

        def logits(cap: float) -> Tensor:
            config = deepcopy(self.stock.config)
            setattr(config.get_text_config(), SOFTCAP, cap)
            model = type(self.stock)(config).eval()
            model.load_state_dict(self.stock.state_dict())
            with torch.no_grad():
                return _logits_of(model, self.tokens)

        free = logits(1e6)
        cap = float(free.abs().max()) / 2
        return _largest_difference([logits(cap)], [cap * torch.tanh(free / cap)])

    def _token_rows(self) -> TokenRows:
        tokens = [self.tokens[row, begin : end + 1] for row, begin, end in self.parts]
        starts = np.cumsum([0, *map(len, tokens)])
        flat = np.concatenate(tokens).astype(np.int32)
        is_target = np.ones(len(flat), np.bool_)
        is_target[starts[:-1]] = False
        return TokenRows(flat, is_target, starts)

    def _rows(self, alone: Sequence[Tensor]) -> float:
        rows = self._token_rows()
        if not can_keep_rows_apart(self.recipe, self.stock.config).value:
            # Attention cannot keep rows apart, so each row is a separate sample.
            return self._padded(alone)
        # One position more than the rows fill, because the padding is a document too.
        windows = pack(rows.lengths, self.length + 1)
        packed = PackedRows(rows, windows, sequence_length=self.length + 1, padding_id=1)
        logits = self._logits(collate_packed([packed[index] for index in range(len(packed))]))
        ours, theirs = [], []
        for window, members in enumerate(windows):
            end = 0
            for row in members.tolist():
                begin, end = end, end + int(rows.lengths[row])
                ours.append(logits[window : window + 1, begin:end])
                theirs.append(alone[row])
        return _largest_difference(ours, theirs)

    def _padded(self, alone: Sequence[Tensor]) -> float:
        rows = self._token_rows()
        each = list(np.arange(len(rows))[:, None])
        samples = PackedRows(rows, each, sequence_length=self.length, padding_id=1)
        batch = collate_packed([samples[index] for index in range(len(samples))], pad_to_multiple_of=1)
        logits = self._logits(batch)
        return _largest_difference([logits[row : row + 1, : own.shape[1]] for row, own in enumerate(alone)], alone)

    def _rounding(self, alone: Sequence[Tensor]) -> float:
        """Return the difference of transformers' own forward pass between fp32 and fp64, or 0 if fp64 fails."""
        with suppress(Exception), torch.no_grad():
            wide = deepcopy(self.stock).double()
            return _largest_difference(alone, [_logits_of(wide, piece) for piece in self.pieces])
        return 0.0

    def _effect_of_later_tokens(self, alone: Sequence[Tensor]) -> float:
        """Return how much later tokens change earlier logits in transformers' own forward pass."""
        with torch.no_grad():
            first = [(number, row) for number, (row, begin, _) in enumerate(self.parts) if begin == 0]
            whole = _logits_of(self.stock, self.tokens[:, :-1])
        ours = [whole[row : row + 1, : alone[number].shape[1]] for number, row in first]
        return _largest_difference(ours, [alone[number] for number, _ in first])

    def _chunked(self) -> float | None:
        if chunked_loss.why_whole(self.trained) is not None:
            # Training uses whole logits.
            return None
        batch, head = self._batch(is_masked=False), self.trained.get_output_embeddings()
        labels, smoothing, z_loss = batch["labels"], self.recipe.loss.label_smoothing, self.recipe.loss.z_loss

        def own() -> Tensor:
            return self.forward.loss_sum(_logits_of(self.trained, batch["input_ids"]), labels, smoothing, z_loss)

        def in_chunks() -> Tensor:
            hidden = self.forward.hidden_states(self.trained, batch, self.compiled)
            rows = max(1, labels.numel() // 3)
            return chunked_loss.chunked_loss(head, hidden, labels, smoothing, rows, z_loss=z_loss)

        return _difference_of_losses(self.trained, own, self.trained, in_chunks)

    def _checkpointing(self) -> float:
        batch, smoothing = self._batch(is_masked=self.is_masked), self.recipe.loss.label_smoothing
        saves = deepcopy(self.trained)
        checkpoint_activations(saves, self.recipe.precision)

        def loss_of(model: nn.Module) -> Callable[[], Tensor]:
            return lambda: self.forward.loss_sum(
                self.forward.logits(model, batch, self.compiled), batch["labels"], smoothing
            )

        return _difference_of_losses(self.trained, loss_of(self.trained), saves, loss_of(saves))

    def _leaking_layer(self) -> str | None:
        """Return the type of the first part of a block whose output depends on the previous document."""
        _, begin, end = next(part for part in self.parts if part[1] > 0)
        outputs: list[tuple[str, Tensor]] = []

        def keep(name: str) -> Callable[..., None]:
            def hook(module: nn.Module, inputs: Any, output: Any) -> None:
                found = output[0] if isinstance(output, tuple) else output
                if isinstance(found, Tensor) and found.is_floating_point() and found.shape[1:2] == (self.length,):
                    outputs.append((name, found.detach()[:, begin:end]))

            return hook

        named = dict(self.trained.named_modules())
        hooks = [module.register_forward_hook(keep(name)) for name, module in named.items()]
        batch = dict(self._batch(is_masked=True))
        other = batch["input_ids"].clone()
        # Shuffle only the previous document.
        other[0, 1:begin] = other[0, 1:begin].flip(0).roll(1)
        try:
            with suppress(Exception):
                self._logits(batch)
                first = list(outputs)
                outputs.clear()
                self._logits(batch | {"input_ids": other})
                for (name, one), (_, two) in zip(first, outputs, strict=False):
                    if (one[0] - two[0]).abs().max() > SAME * one[0].abs().max():
                        return _part_of_block(named, name)
        finally:
            for hook in hooks:
                hook.remove()
        return None


def _logits_of(model: nn.Module, tokens: Any) -> Tensor:
    """Return the logits (B, T, vocabulary) of transformers' own forward pass."""
    return model(input_ids=torch.as_tensor(tokens), use_cache=False).logits


def _part_of_block(named: Mapping[str, nn.Module], name: str) -> str:
    """Return the class of the module directly inside a numbered block that contains (or is) the named module."""
    parts = name.split(".")
    block = next((depth for depth, part in enumerate(parts) if part.isdigit()), len(parts))
    return type(named[".".join(parts[: block + 2])]).__name__


def _largest_difference(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    """Return the largest difference as a share of the largest value of `theirs`, or infinity unless all are finite."""
    scale = max(float(each.abs().max()) for each in theirs)
    found = max(float((one - two).abs().max()) for one, two in zip(ours, theirs, strict=True)) / scale
    return found if np.isfinite(found) else np.inf


def _difference_of_losses(
    one: nn.Module, loss_of_one: Callable[[], Tensor], two: nn.Module, loss_of_two: Callable[[], Tensor]
) -> float:
    """Return the larger of the differences of two losses and of their gradients, in training mode with equal seeds."""
    found = []
    for model, loss_of in ((one, loss_of_one), (two, loss_of_two)):
        model.train()
        model.zero_grad()
        torch.default_generator.manual_seed(1)
        loss = loss_of()
        loss.backward()
        gradients = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
        found.append((loss.detach()[None], gradients))
        model.zero_grad()
        model.eval()
    (loss, gradients), (other_loss, other_gradients) = found
    if gradients.keys() != other_gradients.keys() or not gradients:
        return np.inf
    names = list(gradients)
    of_gradients = _largest_difference([other_gradients[name] for name in names], [gradients[name] for name in names])
    return max(_largest_difference([other_loss], [loss]), of_gradients)


def _remembered(recipe: Recipe, config: PreTrainedConfig, checks: Sequence[str], forward: Forward) -> Proof:
    """Return the cached proof for this model, these settings, and these versions, or compute and cache it."""
    # The remote code may change while the configuration stays the same.
    if recipe.model.trust_remote_code:
        return examine(recipe, config, forward, checks)
    data = CausalLMData.of(recipe.data)
    kernels = (activation_checkpointing, activations, attention, chunked_loss, documents)
    functions = (*forward, collate_packed, collate_windows, can_keep_rows_apart, toy_model)
    modules = map(inspect.getmodule, (*kernels, *functions))
    settings = {
        "config": config.to_dict(),
        "checks": list(checks),
        "model": recipe.model.model_dump(exclude={"pretrained"}),
        "data": [data.format, data.mask_documents, data.sequence_length],
        "sections": [recipe.loss.model_dump(), recipe.precision.model_dump()],
        "versions": [torch.__version__, transformers.__version__],
        "code": [inspect.getsource(each) for each in modules if each is not None],
        "probe": Path(__file__).read_text(),
    }
    path = cache_root(recipe.data) / "probes" / f"{json_digest(settings)[:32]}.json"
    known = read_json(path)
    with suppress(TypeError):
        if known is not None:
            return Proof(**known)
    proof = examine(recipe, config, forward, checks)
    # Without a cache, each start probes again.
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(asdict(proof)).encode())
    return proof
