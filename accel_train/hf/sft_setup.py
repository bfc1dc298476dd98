"""The set-up of an SFTTrainer: the table of `trl.SFTConfig`'s own fields, and the model, tokenizer, and collator.

The table is shown in docs/hf_trainer.md. TRL takes seconds to import, so only functions import it.
"""

import dataclasses
import inspect
import re
from importlib.metadata import version
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoProcessor, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin, TrainingArguments
from transformers.trainer_utils import unwrap_peft_model

from accel_train.core.errors import SettingError, check_packages
from accel_train.core.format import format_count
from accel_train.hf.argument_table import Rule, argument_error, check_fields, honored, refused
from accel_train.hf.inputs import Collator
from accel_train.model.freeze import ends_with, matching
from accel_train.model.isolation import isolated
from accel_train.model.kernels.toy import in_words, toy_model

SAME = 1e-4
"""Largest difference that counts as rounding, as a share of the largest logit or of the loss. Leaks are far larger."""

TESTED = "1.16.0"
"""Version of TRL that the tests run."""
USED = {
    "trl.trainer.sft_trainer:SFTTrainer._prepare_dataset": (
        *("self", "dataset", "processing_class", "args", "packing", "formatting_func", "dataset_name"),
    ),
    "trl.trainer.sft_trainer:DataCollatorForLanguageModeling": ("pad_token_id", "padding_free", "pad_to_multiple_of"),
    "trl.trainer.utils:create_model_from_path": ("model_id",),
    "trl.trainer.utils:add_fused_lm_head": ("model", "outputs"),
    "trl.data_utils:is_conversational": ("example",),
    "trl.data_utils:is_conversational_from_value": ("example",),
    "trl.chat_template_utils:clone_chat_template": ("model", "source_tokenizer_path"),
    "trl.chat_template_utils:get_training_chat_template": ("processing_class",),
    "trl.chat_template_utils:has_generation_markers": ("chat_template",),
    "trl.chat_template_utils:is_chat_template_stop_token_trained": ("processing_class", "chat_template"),
}
"""Names of TRL that are used here, with the parameters that they need."""


def _loads_whole(kwargs: Any) -> bool:
    return kwargs is None or (kwargs.get("device_map") in (None, "auto") and "torch_dtype" not in kwargs)


def _is_known(kwargs: Any) -> bool:
    return not kwargs or (isinstance(kwargs, dict) and kwargs.keys() <= {"skip_prepare_dataset"})


SFT_FIELDS: dict[str, Rule] = {
    # Model
    "model_init_kwargs": honored(
        "passed to from_pretrained if `model` is a path or name, with dtype float32 by default",
        allowed=_loads_whole,
        remedy="TRL ignores torch_dtype: name it dtype. A device_map splits the model: set fsdp=True to shard",
    ),
    "trust_remote_code": honored("for model and tokenizer"),
    "router_aux_loss_coef": honored("weight of the router loss of mixture-of-experts models, also by default"),
    "chat_template_path": honored("a Jinja file, or a tokenizer whose template and tokens TRL clones"),
    # Data
    "dataset_text_field": honored("column of plain text"),
    "dataset_kwargs": honored(
        "skip_prepare_dataset", allowed=_is_known, remedy="TRL reads only skip_prepare_dataset; remove other keys"
    ),
    "dataset_num_proc": honored("processes that prepare the data"),
    "eos_token": honored("set on tokenizer and model"),
    "max_length": honored("longer rows are cut, or packed in rows of this length"),
    "truncation_mode": honored("keep_start, keep_end"),
    "shuffle_dataset": honored("once with `seed`, before packing and training"),
    "packing": honored("several rows per sequence, which do not attend to each other; a probe of the model proves it"),
    "packing_strategy": honored(
        "bfd cuts rows longer than max_length, bfd_split splits them",
        allowed=lambda value: value in ("bfd", "bfd_split"),
        remedy="wrapped rows attend to their neighbors; use bfd or bfd_split",
    ),
    "padding_free": honored("the rows of a micro-batch as one sequence; the probe of packing applies"),
    "pad_to_multiple_of": honored("by TRL's collator"),
    "eval_packing": honored("default: as packing; True needs packing=True, whose collator keeps rows apart"),
    # Loss
    "completion_only_loss": honored("default: True if rows have prompt and completion; True needs such rows"),
    "assistant_only_loss": honored("chats, by `{% generation %}` of the template; TRL patches the templates it knows"),
    "loss_type": honored(
        "nll, dft", allowed=lambda value: value in ("nll", "dft", "chunked_nll"), remedy="use nll or dft"
    ),
    "activation_offloading": refused("not tested with repeated steps; use gradient_checkpointing"),
    "pad_token": honored("set on the tokenizer; default: its own, or its eos_token"),
}


def check_trl() -> None:
    """Check that TRL is installed and has the functions that are used here.

    Raises:
        SettingError: it is missing or another version. The message names the extra and the tested version.
    """
    check_packages(["trl"], "sft", "SFTTrainer")
    for name, needed in USED.items():
        try:
            parameters = inspect.signature(resolve_name(name)).parameters.keys()
        except (ImportError, AttributeError) as error:
            raise version_error(f"it has no {name}") from error
        # A private method may read more than it is given.
        if not parameters >= set(needed) or ("._" in name and tuple(parameters) != needed):
            raise version_error(f"{name} has other arguments")


def version_error(problem: str) -> SettingError:
    """Return the error about a version of TRL that works differently from the tested one."""
    remedy = f"Install the tested version: pip install trl=={TESTED}."
    problem = f"does not work with trl {version('trl')}: {problem}"
    return SettingError(problem, remedy, "SFTTrainer", ("args",))


def config_of(args: Any, model: Any) -> Any:
    """Return the arguments as a checked `trl.SFTConfig`. TrainingArguments are converted as in TRL.

    Raises:
        SettingError: TRL is missing, the configuration belongs to another trainer of TRL, or a field has an
            unsupported value.
    """
    check_trl()
    from trl import SFTConfig

    if args is None:
        name = model if isinstance(model, str) else getattr(model.config, "_name_or_path", "")
        args = SFTConfig(f"{name.rstrip('/').split('/')[-1]}-SFT")
    elif not isinstance(args, TrainingArguments):
        raise argument_error(f"got {type(args).__name__}", "Give a trl.SFTConfig.", "args")
    elif not isinstance(args, SFTConfig):
        others = [each for each in type(args).__mro__ if each.__module__.split(".")[0] == "trl"]
        if others:
            raise argument_error(
                f"{others[0].__name__} is for preference, reward, or reinforcement learning",
                "Use trl's own trainer for it; accel_train has only SFTTrainer.",
                "args",
            )
        args = SFTConfig(**{**args.to_dict(), "hub_token": args.hub_token})
    shared = {field.name for field in dataclasses.fields(TrainingArguments)}
    own = (field for field in dataclasses.fields(SFTConfig) if field.name not in shared)
    check_fields(args, own, SFT_FIELDS, "SFTConfig", "SFTTrainer")
    _check_combinations(args)
    return args


def joins_rows(args: Any) -> dict[str, bool]:
    """Return the argument that puts several rows into one sequence, by name."""
    return {"packing" if args.packing else "padding_free": True}


def _check_combinations(args: Any) -> None:
    if args.use_liger_kernel:
        raise argument_error("its loss replaces the SFTTrainer's", "Remove it.", use_liger_kernel=True)
    if args.deepspeed:
        raise argument_error("not tested with SFTTrainer", "Use fsdp=True.", deepspeed=args.deepspeed)
    kwargs = args.gradient_checkpointing_kwargs or {}
    if kwargs.get("selective"):
        raise argument_error("selective is a key of TRL's own loop", "Remove it.", gradient_checkpointing_kwargs=kwargs)
    if args.packing and args.max_length is None:
        raise argument_error("packing needs a length", "Set max_length.", packing=True, max_length=None)
    if args.eval_packing and not args.packing:
        raise argument_error(
            "the collator of unpacked training rows would let packed evaluation rows attend to each other",
            "Set packing=True too, or leave it out.",
            eval_packing=True,
        )
    if args.padding_free and not args.packing and args.max_length is not None:
        raise argument_error(
            "rows are not cut without padding", "Set packing=True, or max_length=None.", padding_free=True
        )


def check_adapter(model: Any, peft_config: Any, args: Any) -> None:
    """Check `peft_config` and the adapters that the model already has, before a model is built.

    Raises:
        SettingError: it is not a configuration of peft, the model already has an adapter, or rows are packed although
            an adapter depends on the whole sequence.
    """
    name, configs = "peft_config", list(getattr(model, "peft_config", {}).values())
    if peft_config is not None:
        check_packages(["peft"], "sft", name)
        from peft import PeftConfig

        if not isinstance(peft_config, PeftConfig):
            raise argument_error(f"got {type(peft_config).__name__}", "Give a peft.LoraConfig.", name)
        if configs:
            raise argument_error(
                "the model already has an adapter", "Leave it out, or call model.merge_and_unload() first.", name
            )
        configs.append(peft_config)
    for config in configs:
        if (args.packing or args.padding_free) and depends_on_the_sequence(config):
            problem = (
                f"{type(config).__name__} depends on the whole sequence, so rows in one sequence change each other"
            )
            raise argument_error(problem, "Set it False, or give a LoraConfig.", **joins_rows(args))


def depends_on_the_sequence(config: Any) -> bool:
    """Return whether an adapter computes a token from more than the token's own inputs of a layer."""
    # An activated LoRA starts at its invocation tokens, and X-LoRA scales by the hidden states of the sequence.
    by_tokens = getattr(config, "alora_invocation_tokens", None) or str(config.peft_type).endswith("XLORA")
    return config.is_prompt_learning or config.is_adaption_prompt or bool(by_tokens)


def check_names(model: nn.Module, config: Any) -> None:
    """Check that each name in the lists of `peft_config` is in the model. peft drops a name if it finds another.

    Raises:
        SettingError: a name matches nothing. The message names the nearest one.
    """
    modules = [name for name, _ in model.named_modules() if name]
    parameters = [name for name, _ in model.named_parameters()]
    for field in ("target_modules", "exclude_modules", "trainable_token_indices", "modules_to_save"):
        value = getattr(config, field, None)
        # One text is a regular expression, or all-linear.
        if isinstance(value, list | tuple | set | dict):
            match = str.endswith if field == "modules_to_save" else ends_with
            matching(modules, value, f"peft_config.{field}", kind="module", match=match)
    if getattr(config, "target_parameters", None):
        matching(parameters, config.target_parameters, "peft_config.target_parameters", match=ends_with)
    for field in ("rank_pattern", "alpha_pattern"):
        matching(modules, getattr(config, field, None) or (), f"peft_config.{field}", kind="module", match=_is_key_of)
    layers = getattr(config, "layers_to_transform", None)
    numbers = [str(each) for each in ([layers] if isinstance(layers, int) else layers or ())]
    matching(modules, numbers, "peft_config.layers_to_transform", kind="layer", match=ends_with)


def _is_key_of(name: str, key: str) -> bool:
    """Return whether a key of `rank_pattern` or `alpha_pattern`, a regular expression, is for this module."""
    return re.fullmatch(rf"(?:.*\.)?(?:{key})", name) is not None


def loaded(model: Any, args: Any, quantization_config: Any) -> tuple[Any, str | None]:
    """Return the model, loaded by TRL if it is a path or a name, and its revision.

    Raises:
        SettingError: the model is given, so that model_init_kwargs or quantization_config would have no effect.
    """
    given = dict(args.model_init_kwargs or {})
    if not isinstance(model, str):
        name = "model_init_kwargs" if given else "quantization_config"
        if given or quantization_config is not None:
            raise argument_error("the model is already made", "Remove it, or give the model's name.", name)
        return _causal(model), None
    if quantization_config is not None:
        if "quantization_config" in given:
            raise argument_error("both quantize", "Give only one.", "quantization_config", "model_init_kwargs")
        given["quantization_config"] = quantization_config
    from trl.trainer.utils import create_model_from_path

    given.setdefault("trust_remote_code", args.trust_remote_code)
    # The run places the model.
    return _causal(create_model_from_path(model, **{**given, "device_map": None})), given.get("revision")


def _causal(model: Any) -> Any:
    """Return the model. Raises SettingError if it is not a causal language model of transformers or peft."""
    inner = unwrap_peft_model(model) if isinstance(model, nn.Module) else model
    if not isinstance(inner, PreTrainedModel) or inner.get_output_embeddings() is None:
        raise argument_error(
            f"{type(inner).__name__} has no language-model head", "Give a causal language model.", "model"
        )
    if inner.config.is_encoder_decoder:
        raise argument_error(f"{type(inner).__name__} has an encoder", "Use accel_train.Seq2SeqTrainer.", "model")
    return model


def tokenizer_of(processing_class: Any, model: Any, revision: str | None, args: Any) -> PreTrainedTokenizerBase:
    """Return the given tokenizer, or the model's, with the end token of the arguments.

    Raises:
        SettingError: it is not a tokenizer, or its vocabulary lacks `eos_token`.
    """
    name = "processing_class"
    if processing_class is None:
        place = getattr(model.config, "_name_or_path", "")
        options = {"revision": revision, "trust_remote_code": args.trust_remote_code}
        try:
            processing_class = AutoProcessor.from_pretrained(place, **options)
        except (OSError, ValueError) as error:
            raise argument_error(f"no tokenizer in {place or 'a model without a name'}", "Give one.", name) from error
    if isinstance(processing_class, ProcessorMixin):
        raise argument_error(
            "processors of images or audio are not supported",
            "Use trl.SFTTrainer, or give the tokenizer of a text model.",
            name,
        )
    if not isinstance(processing_class, PreTrainedTokenizerBase):
        raise argument_error(f"got {type(processing_class).__name__}", "Give a tokenizer.", name)
    if args.eos_token is not None:
        if args.eos_token not in processing_class.get_vocab():
            raise argument_error("not in the tokenizer's vocabulary", "Add it first.", eos_token=args.eos_token)
        processing_class.eos_token, end = args.eos_token, processing_class.convert_tokens_to_ids(args.eos_token)
        model.config.get_text_config().eos_token_id = end
        ends = model.generation_config.eos_token_id
        ends = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
        if end not in ends:
            model.generation_config.eos_token_id = [end, *ends]
    return processing_class


def with_chat_template(model: Any, tokenizer: Any, args: Any) -> tuple[Any, list[int]]:
    """Return the model, and the tokens that it got with the template of `chat_template_path`."""
    if args.chat_template_path is None:
        return model, []
    path = Path(args.chat_template_path)
    if path.is_file() and path.suffix in (".jinja", ".j2"):
        tokenizer.chat_template = path.read_text(encoding="utf-8")
        return model, []
    from trl.chat_template_utils import clone_chat_template

    model, _, added = clone_chat_template(model, tokenizer, args.chat_template_path)
    return model, list(added)


def with_adapter(model: Any, args: Any, config: Any, added: list[int]) -> Any:
    """Return the model with the adapter of `config`, whose new tokens are trained too.

    Raises:
        SettingError: an adapter changes the output embeddings, whose weights the loss reads directly.
    """
    if config is not None:
        from peft import get_peft_model

        if added:
            indices = config.trainable_token_indices or {}
            indices = indices if isinstance(indices, dict) else {"embed_tokens": list(indices)}
            config.trainable_token_indices = {**indices, "embed_tokens": [*indices.get("embed_tokens", []), *added]}
            config.modules_to_save = sorted({*(config.modules_to_save or ()), "lm_head"})
        check_names(model, config)
        model = get_peft_model(model, config)
    if unwrap_peft_model(model) is model:
        return model
    if config is None and added:
        raise argument_error(
            f"the adapter does not train the {format_count(len(added), 'token')} that the template adds",
            "Give the base model and peft_config.",
            chat_template_path=args.chat_template_path,
        )
    from peft.tuners.tuners_utils import BaseTunerLayer

    if isinstance(model.get_output_embeddings(), BaseTunerLayer):
        raise argument_error(
            "an adapter on lm_head would not be trained", "Remove lm_head from target_modules.", "peft_config"
        )
    if args.gradient_checkpointing:
        model.enable_input_require_grads()
    # As in QLoRA's paper and in TRL. Updates of a DoRA magnitude are smaller than bf16 can represent.
    if getattr(model, "is_loaded_in_4bit", False) or getattr(model, "is_loaded_in_8bit", False):
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and "lora_magnitude_vector" not in name:
                parameter.data = parameter.data.to(torch.bfloat16)
    return model


def collator_for(model: Any, tokenizer: Any, args: Any, *, padding_free: bool) -> Collator:
    """Return TRL's collator, after setting the padding token on tokenizer and model.

    Raises:
        SettingError: the vocabulary lacks the token.
    """
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    token = args.pad_token or tokenizer.pad_token or tokenizer.eos_token
    if token is None or token not in tokenizer.get_vocab():
        raise argument_error(
            "the padding token is not in the tokenizer's vocabulary",
            "Set tokenizer.pad_token.",
            "processing_class",
            pad_token=token,
        )
    tokenizer.pad_token = token
    model.config.get_text_config().pad_token_id = model.generation_config.pad_token_id = tokenizer.pad_token_id
    return DataCollatorForLanguageModeling(
        pad_token_id=tokenizer.pad_token_id, padding_free=padding_free, pad_to_multiple_of=args.pad_to_multiple_of
    )


def prepare_forward(model: Any, args: Any, *, padding_free: bool) -> bool:
    """Give the model TRL's forward without logits, if it is exact. Return whether it is.

    A model of the same layers at toy size decides, on a CPU in fp32: its loss must equal the model's own, and rows that
    share a sequence must have the logits that they have alone.

    Raises:
        SettingError: rows that share a sequence change each other, or this cannot be proved.
    """
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling
    from trl.trainer.utils import add_fused_lm_head

    inner = unwrap_peft_model(model)
    config = type(inner.config).from_dict(
        {key: value for key, value in inner.config.to_dict().items() if key != "quantization_config"}
    )
    # Kernels of flash attention read the same positions, but need a GPU.
    if "flash" not in (kernel := inner.config._attn_implementation or "sdpa"):
        config._attn_implementation = kernel
    rows = [{"input_ids": [5, 9, 7, 3, 8]}, {"input_ids": [6, 4, 9, 2, 7, 5]}]
    packed = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)(rows)
    try:
        with isolated(nn.Module(), torch.device("cpu")), torch.device("cpu"), torch.no_grad():
            toy: Any = toy_model(config, trust_remote_code=args.trust_remote_code).float().eval()
            if padding_free:
                alone = [toy(input_ids=torch.tensor([row["input_ids"]]), use_cache=False).logits[0] for row in rows]
                given = {key: value for key, value in packed.items() if key != "labels"}
                leak = difference(toy(**given, use_cache=False).logits[0], torch.cat(alone))
                if not leak <= SAME:
                    raise argument_error(
                        f"rows in one sequence change each other in {type(inner).__name__} ({leak:.0e})",
                        "Set it False.",
                        **joins_rows(args),
                    )
            batch = DataCollatorForLanguageModeling(pad_token_id=0)(rows)
            own = toy(**batch, use_cache=False).loss
            add_fused_lm_head(toy)
            is_exact = difference(toy(**batch, fused_lm_head=True).loss, own) <= SAME
    except SettingError:
        raise
    # Any failure of a foreign model means that nothing is proved.
    except Exception as error:
        if padding_free:
            raise argument_error(
                f"cannot prove that {type(inner).__name__} keeps rows apart: {in_words(error)}",
                "Set it False.",
                **joins_rows(args),
            ) from error
        return False
    if is_exact:
        add_fused_lm_head(inner, outputs=("log_probs", "entropy", "is_top1"))
    return is_exact


def difference(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference as a share of the largest expected value."""
    return float((found - expected).abs().max() / expected.abs().max())


def router_weight(model: Any, args: Any) -> float:
    """Return the weight of the router loss, and set it in the model's configuration, as in TRL.

    Raises:
        SettingError: the argument is given, but the model is not a mixture of experts.
    """
    config, given = model.config.get_text_config(), args.router_aux_loss_coef
    weight = getattr(config, "router_aux_loss_coef", 0.0) if given is None else given
    has_router = hasattr(config, "output_router_logits")
    if given and not has_router:
        raise argument_error(
            f"{type(model).__name__} returns no router logits", "Remove it.", router_aux_loss_coef=given
        )
    if hasattr(config, "router_aux_loss_coef"):
        config.router_aux_loss_coef, config.output_router_logits = weight, has_router and weight != 0.0
    return float(weight) if has_router else 0.0


def label_log_probs(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log-probability of each next label, 0 at -100, and the number of labels."""
    logits, labels = shifted(logits, labels)
    mask = labels.ne(-100)
    found = logits.float().log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return found.masked_fill(~mask, 0.0), mask.sum()


def shifted(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logits without virtual tokens, and the label that each of them predicts."""
    return logits[:, -labels.shape[1] : -1], labels[:, 1:].to(logits.device)


@torch.no_grad()
def label_scores(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the number of labels, the sum of the entropies of their predictions (nats), and how many are right.

    Works in parts of 1024 positions, so that no second copy of all logits is made.
    """
    logits, labels = shifted(logits, labels)
    entropy, correct = logits.new_zeros((), dtype=torch.float32), labels.new_zeros(())
    rows = zip(logits, labels, strict=True)
    for part, wanted in ((a, b) for row, own in rows for a, b in zip(row.split(1024), own.split(1024), strict=True)):
        mask, log_probs = wanted.ne(-100), part.float().log_softmax(-1)
        entropy -= (log_probs.exp() * log_probs).sum(-1).masked_fill(~mask, 0.0).sum()
        correct += (part.argmax(-1).eq(wanted) & mask).sum()
    return labels.ne(-100).sum(), entropy, correct
