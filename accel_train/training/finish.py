"""Finish a run after its last step: evaluate, and write the weights, the summary and the report."""

import copy
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from accel_train.checkpoint.contents import load_model_tensors
from accel_train.checkpoint.fingerprint import digest_of_recipe
from accel_train.core.errors import DataError, Preempted
from accel_train.core.json_io import json_text
from accel_train.core.ownership import replacing, write_file
from accel_train.core.redaction import redact, redact_text
from accel_train.core.state import JsonRecord
from accel_train.core.terminal import print_line
from accel_train.core.work import working
from accel_train.data.images.boxes import match_boxes
from accel_train.engine.evaluation import evaluation_mode
from accel_train.engine.loader import to_device
from accel_train.engine.resolve import change_model, makes_new_models
from accel_train.engine.run import RunContext, RunPlan
from accel_train.engine.save import refuse_nonfinite_model
from accel_train.inference.evaluate import format_augmentation
from accel_train.metrics.baselines import (
    compare,
    format_main_score,
    format_scores,
    likely_causes,
    rows_of,
    unbeaten_baseline,
)
from accel_train.model.kernels.frozen import in_fp32
from accel_train.model.kernels.nf4 import packed_layers
from accel_train.model.pretrained import quiet_bars
from accel_train.model.tensors import as_tensors, without_values
from accel_train.model.weights import in_bf16, narrow_names, whole_numel
from accel_train.observe.progress import without_variants
from accel_train.observe.run_folder import EXAMPLES_FILE, SUMMARY_FILE
from accel_train.parallel.building import filled
from accel_train.recipe.tasks import targets_of
from accel_train.report.pictures import NO_CLASS, VERDICTS, Box, address_of, class_colors, draw_boxes, palette
from accel_train.report.report import write_report
from accel_train.report.run import how_to_use
from accel_train.runtime.doctor import environment, launch_facts
from accel_train.runtime.process_group import wait_for_all
from accel_train.task import is_of_transformers, rate_name
from accel_train.training.model_selection import apply_calibration, calibrate, evaluate_at_end, load_best

MAX_TRIED = 256
"""Samples that are predicted once more, evenly spaced: seconds, whatever the size of the evaluation data."""
PICTURES = {"label": 1, "mask": 3, "boxes": 2}
"""Pictures that an example takes, by the kind of its prediction. `evaluate.num_examples` is divided by it."""
LEAST_SCORE = 0.3
"""Least score of a predicted box in a picture, if the evaluation found no better one."""
MAX_CHARACTERS = 400
EDGE, EDGE_OF_BOXES = 160, 240
"""Pixels of a picture's longer side. Beside boxes there are names to read."""


def finish_run(run: RunContext) -> tuple[JsonRecord, nn.Module]:
    """Evaluate on all samples, restore the best weights if the recipe says so, and write `model/`, summary.json and
    report.html.

    Returns what summary.json holds, on the main process, and the model with the weights that are written.

    Raises:
        DataError: no step of the run had a target.
        Preempted: the run was asked to stop during an evaluation; all steps are saved.
        TrainingStopped: the weights, their average or their loss are not finite: nothing is published.
    """
    accelerator, output_dir = run.accelerator, run.plan.output_dir
    # The guard counts steps without targets since the last start only.
    if run.state.num_targets_seen == 0 < run.state.step:
        raise DataError(
            f"no step of {run.state.step} had a target, so nothing was trained. Check the labels (or masks) of "
            "the training data, and which label the task ignores"
        )
    if run.plan.can_evaluate:
        evaluate_at_end(run)
    else:
        calibrate(run, run.state.step)
    if run.state.evaluation_owed:
        message = f"asked to stop: all {run.state.step} steps are saved, but the last evaluation is not done"
        run.observer.on_event("preempted", run.state.step, message)
        raise Preempted(f"{message}; {run.plan.how_to_resume} to evaluate")
    summary: JsonRecord = {}
    with run.strategy.averaged():
        refuse_nonfinite_model(run)
        model = _kept_model(run)
        if accelerator.is_main_process:
            with working("writing model/"):
                save_model(run, model)
            with working("computing baselines and a sample"):
                summary = summarise(run, model)
            with warned(run, f"{EXAMPLES_FILE} is not written"), working("predicting examples for the report"):
                if examples := examples_of(run, model):
                    write_file(output_dir / EXAMPLES_FILE, json_text(examples).encode(), output_dir)
    if accelerator.is_main_process and run.evaluation.details:
        with warned(run, "evaluation.json is not written"):
            write_file(output_dir / "evaluation.json", json_text(run.evaluation.details).encode(), output_dir)
    with working("writing the summary"):
        run.observer.finish(summary)
    if accelerator.is_main_process:
        report: Path | str = f"not written; accel-train report {output_dir} tries again"
        with warned(run, "report.html is not written"), working("writing the report"):
            report = write_report([output_dir])
        with warned(run, "the results are not printed"):
            _note_end(run, summary, report)
    wait_for_all()
    return summary, model


def report_finished(run: RunContext, summary: JsonRecord) -> nn.Module:
    """Print that a run has finished before, and how to use it; return the model with the weights in `model/`."""
    step = run.state.step
    run.state.best_step = summary.get("best_step")  # the evaluation at the end came after the last checkpoint
    is_wanted = run.plan.recipe.loads_best_model and run.state.best_step not in (None, step)
    result = "nothing is changed"
    if is_wanted and not load_best(run):
        result += f". The checkpoint of step {run.state.best_step} is damaged: take the best weights from model/"
    run.evaluation.calibration = summary.get("calibration") or {}
    apply_calibration(run, run.strategy.inner.model)
    with run.strategy.averaged():
        model = _kept_model(run)
    metric = run.plan.recipe.evaluate.best_metric
    value = (summary.get("eval") or {}).get(metric)
    score = f" ({metric.replace('_', ' ')} {value:.4g})" if isinstance(value, float) else ""
    if run.accelerator.is_main_process:
        report, written = run.plan.output_dir / "report.html", run.plan.output_dir / SUMMARY_FILE
        # A kill may have come between the summary and the report.
        if not report.exists() or report.stat().st_mtime_ns < written.stat().st_mtime_ns:
            with warned(run, "report.html is not written"):
                write_report([run.plan.output_dir])
        print_line(f"{run.plan.output_dir}: finished at step {step}{score}; {result}")
        _show_use(run.plan)
    wait_for_all()  # one that ends early would count as lost
    return model


def _kept_model(run: RunContext) -> nn.Module:
    """Return the model with the weights in use; within `averaged` a copy, as the run's own gets its last ones back."""
    model = full_model(run)
    averages = run.plan.recipe.optimizer.ema_decay is not None and run.strategy.is_replicated
    return copy.deepcopy(model) if averages else model


@contextmanager
def warned(run: RunContext, what: str) -> Iterator[None]:
    """Turn any error inside into a printed warning: the weights are written, and the run has finished."""
    try:
        yield
    except Exception as error:
        reason = redact_text(str(error)).strip().partition("\n")[0]
        run.observer.note(f"warning: {what} ({type(error).__name__}: {reason})")


def full_model(run: RunContext) -> nn.Module:
    """Return the trained model with all its weights on the main process; all processes call it.

    Sharded weights are gathered in the host memory of the main process, a tensor at a time, and held once. They are
    fp32. With `checkpoint.model_dtype` bf16 they are bf16, but weights to merge adapters into keep their types.
    """
    plan, strategy = run.plan, run.strategy
    own = strategy.inner.model
    if strategy.is_replicated:
        return in_fp32(own) if is_narrowed(run) else own
    is_narrow = plan.recipe.checkpoint.model_dtype == "bf16"
    narrow = narrow_names(own) | {f"{name}.weight" for name in packed_layers(own)}
    tensors = strategy.full_weights(narrow=narrow if is_narrow and plan.recipe.model.lora is None else ())
    if not run.accelerator.is_main_process:
        return own
    model = None

    def build() -> nn.Module:
        return change_model(plan.recipe, plan.task, plan.task.build_model(plan.recipe, plan.data)).model

    with working("building the model that is written"):
        if strategy.builds_empty and makes_new_models(plan.task):
            # Some tasks compute with weights while they build.
            with suppress(Exception), without_values():
                model = build()
        if model is not None:
            buffers = dict(own.named_buffers(remove_duplicate=False))
            model = filled(model, tensors, buffers, keeps_types=is_narrow)
        if model is None:
            model = build()
            load_model_tensors(model, tensors)
    apply_calibration(run, model)
    return model.eval()


def is_narrowed(run: RunContext) -> bool:
    """Return whether frozen matrices are kept in fewer bits than fp32, so that the model forwards
    under autocast alone.
    """
    kept = run.plan.choices.get("model.frozen_dtype")
    return kept is not None and kept.value != "fp32"


def sample_of(run: RunContext, model: nn.Module) -> JsonRecord | None:
    """Return the task's sample, made on the device where the model is there."""
    plan, strategy = run.plan, run.strategy
    if strategy.is_replicated and is_narrowed(run):
        with run.accelerator.autocast():
            return plan.task.sample(plan.recipe, strategy.inner.model, plan.data)
    # Adapters may be fp32 where the weights are bf16.
    is_mixed = not strategy.is_replicated and plan.recipe.checkpoint.model_dtype == "bf16"
    with torch.autocast("cpu", torch.bfloat16, enabled=is_mixed):
        return plan.task.sample(plan.recipe, model, plan.data)


def save_model(run: RunContext, model: nn.Module) -> None:
    """Write the trained weights to `model/`, whole or not at all, ready for `from_pretrained`;
    adapters to `adapter/`.
    """
    plan = run.plan
    if (section := plan.recipe.model.lora) is not None:
        from accel_train.model.lora import save_adapters, without_adapters

        with replacing(plan.output_dir / "adapter") as staging:
            save_adapters(model, plan.recipe.model, staging)
        model = without_adapters(model, merge=section.merge)
    if plan.recipe.checkpoint.model_dtype == "bf16":
        model = in_bf16(model)
    bars = quiet_bars() if is_of_transformers(model) else nullcontext()
    with replacing(plan.output_dir / "model") as staging, bars, as_tensors(model):
        plan.task.save(model, plan.data, staging)


def summarise(run: RunContext, model: nn.Module) -> JsonRecord:
    """Return what summary.json holds; plain JSON values."""
    plan, state, seconds = run.plan, run.state, max(run.observer.train_seconds, 1e-9)
    baselines = {f"untrained_{name}": value for name, value in state.untrained.items()}
    not_beaten = sample = None
    with warned(run, "baselines are left out"):
        baselines |= plan.task.baselines(plan.data)
        not_beaten = describe_defeat(run, baselines)
    with warned(run, "the sample is left out"):
        sample = sample_of(run, model)
    return {
        "status": "stopped early" if state.stopped_early else "finished",
        "steps": state.step,
        "recipe_digest": digest_of_recipe(plan.given),
        "num_targets": state.num_targets_seen,
        "skipped_steps": state.num_skipped_steps,
        "eval": run.evaluation.scores,
        "metric_for_best_model": plan.recipe.evaluate.metric_for_best_model,
        "best_metric": state.best_metric,
        "best_step": state.best_step,
        "baselines": baselines,
        "calibration": run.evaluation.calibration,
        "not_beaten": not_beaten,
        "sample": sample,
        "data": redact(plan.data.facts.record()),
        "started_in": os.getcwd(),
        "parameters": whole_numel(run.strategy.inner.model.parameters()),
        "world_size": run.accelerator.num_processes,
        "train_seconds": round(run.observer.train_seconds, 3),
        rate_name(targets_of(plan.recipe.task)): state.num_targets_seen / seconds,
        "samples_per_second": state.step * run.sizes.global_batch_size / seconds,
        "peak_memory_bytes": run.memory.peaks,
        "choices": {name: str(choice) for name, choice in plan.choices.items()},
        "environment": launch_facts() | environment(run.accelerator.device),
    }


def describe_defeat(run: RunContext, baselines: Mapping[str, float]) -> JsonRecord | None:
    """Return which baseline the model does not beat, in a sentence, and the likely causes; None where it beats all."""
    plan, state = run.plan, run.state
    section = plan.recipe.evaluate
    found = unbeaten_baseline(run.evaluation.scores, baselines, section.best_metric, section.is_lower_better)
    if found is None:
        return None
    causes = likely_causes(
        run_folder=str(plan.output_dir),
        steps=state.step,
        epochs=state.step / plan.order.steps_per_epoch,
        best_step=state.best_step,
        loss_rose=state.best_loss is not None and state.last_loss is not None and state.last_loss > state.best_loss,
        pretrained=plan.recipe.model.pretrained is not None,
        parameters=whole_numel(run.strategy.inner.model.parameters()),
        samples=len(plan.data.train),  # type: ignore[arg-type]
    )
    return {"sentence": str(found), "causes": causes}


def _note_end(run: RunContext, summary: JsonRecord, report: Path | str) -> None:
    """Print the end of a run: a sample, the numbers, and where everything lies."""
    note, state, plan = run.observer.note, run.state, run.plan
    verbose, door, section = plan.extensions.verbose, plan.extensions.door, plan.recipe.evaluate
    main = section.best_metric
    if summary["sample"]:
        note(f"\nA sample (prompt {summary['sample']['prompt']!r}):\n\n{summary['sample']['text']}\n")
    if summary["eval"] and verbose:
        note(f"Evaluation on all held-out data{', next to baselines' if summary['baselines'] else ''}:")
        note(format_scores(without_variants(summary["eval"], main), summary["baselines"]))
    elif summary["eval"]:
        rows = rows_of(summary["eval"], summary["data"], targets_of(plan.recipe.task))
        compared = compare(summary["eval"], summary["baselines"], main, rows, section.is_lower_better)
        note(f"held-out data: {format_main_score(summary['eval'], main, compared)}")
    if augmented := format_augmentation(run.evaluation.details.get("details", {})):
        note(augmented)
    if (defeat := summary["not_beaten"]) is not None:
        note(f"{defeat['sentence']}. Likely causes, and what to try:")
        for cause in defeat["causes"]:
            note(f"  - {cause}")
    is_best = state.best_step in (None, state.step) or summary["eval"].get(main) == state.best_metric
    if not is_best and not plan.recipe.loads_best_model:
        note(
            f"model/ holds the weights of the last step, but step {state.best_step} evaluated better "
            f"({section.metric_for_best_model} {state.best_metric:.4g}). To write its weights, {door.load_best} and "
            f"{door.again}"
        )
    note(f"weights: {plan.output_dir / 'model'}\nreport:  {report}")
    _show_use(plan)


def _show_use(plan: RunPlan) -> None:
    for line in how_to_use(plan.output_dir, plan.recipe.model_dump()):
        print_line(line)


@dataclass(frozen=True)
class _Predicted:
    """A sample and its prediction: a class, a class per pixel, or a class and corners in pixels per box."""

    index: int
    truth: Any
    guess: Any
    wrong: float = 0
    """1 if the class is wrong, or the share of wrong pixels."""
    confidence: float = 0.0


def examples_of(run: RunContext, model: nn.Module) -> JsonRecord:
    """Return samples with truth and prediction, as plain JSON values; empty where the task predicts no class.

    `kind` is "label" (a class per sample), "mask" (a class per pixel) or "boxes". `tried` is the number of predicted
    samples, `wrong` the number of wrong ones (or the share of their pixels), and `examples` are the samples to show.
    Called on the main process, with whole weights.
    """
    plan = run.plan
    data, source = plan.data, plan.data.source
    most = plan.recipe.evaluate.num_examples
    if data.eval is None or not most or not hasattr(source, "shown") or not run.strategy.is_replicated:
        return {}
    number = len(data.eval)  # type: ignore[arg-type]
    indices = np.unique(np.linspace(0, number - 1, min(number, MAX_TRIED)).astype(int)).tolist()
    kind, found = "label", list[_Predicted]()
    detection = run.evaluation.details.get("details", {}).get("detection", {})
    least = (detection.get("best_f1") or {}).get("score", LEAST_SCORE)
    with evaluation_mode(model), run.accelerator.autocast():
        for at in range(0, len(indices), size := run.sizes.per_device_eval_batch_size):
            here = indices[at : at + size]
            batch = data.collate([data.eval[index] for index in here])
            batch.pop("num_targets")
            batch = to_device(batch, next(model.parameters()).device, pin=False)
            predicted = plan.task.predict_batch(model, batch)
            if "found" in predicted and source.sets.eval.boxes is not None:
                kind, of_batch = "boxes", _of_boxes(here, predicted["found"], source, least)
            elif "labels" in batch and "label" in predicted:
                of_batch = _of_labels(here, batch["labels"], predicted)
            elif "labels" in batch and "mask" in predicted:
                kind, of_batch = "mask", _of_masks(here, batch["labels"], predicted)
            else:
                return {}
            found += of_batch
    most = -(-most // PICTURES[kind])
    shown = sorted((each for each in found if each.wrong), key=lambda each: -each.confidence)[:most]
    facts = {"kind": kind, "tried": len(found), "wrong": sum(each.wrong for each in found)}
    if kind == "boxes":
        facts["least_score"] = least
        shown = found[:: max(1, len(found) // most)][:most]
    facts["examples"] = [_shown(each, kind, source) for each in shown]
    return facts if kind != "mask" else {**facts, "colours": _colours(shown, source.label_names)}


def _of_labels(indices: list[int], labels: Tensor, predicted: Mapping[str, Tensor]) -> Iterator[_Predicted]:
    columns = (each.cpu().tolist() for each in (labels, predicted["label"], predicted["score"]))
    for index, truth, guess, score in zip(indices, *columns):
        if truth >= 0:
            yield _Predicted(index, truth, guess, int(truth != guess), score)


def _of_masks(indices: list[int], labels: Tensor, predicted: Mapping[str, Tensor]) -> Iterator[_Predicted]:
    sizes = zip(predicted["height"].tolist(), predicted["width"].tolist())
    for index, mask, truth, (height, width) in zip(
        indices, predicted["mask"].cpu().numpy(), labels.cpu().numpy(), sizes
    ):
        mask, truth = mask[:height, :width], truth[:height, :width]
        known = (truth != NO_CLASS) & (truth >= 0)
        share = float((mask != truth)[known].mean()) if known.any() else 0.0
        yield _Predicted(index, truth, mask, share, share)


def _of_boxes(indices: list[int], found: Tensor, source: Any, least_score: float) -> Iterator[_Predicted]:
    """Yield each image with its boxes and their verdicts. `found`: (N, K, 6), scores and classes before the edges."""
    names = source.label_names
    for index, rows in zip(indices, found.cpu().numpy()):
        truth = source.sets.eval.boxes_of(index)
        sure = rows[rows[:, 0] >= np.float32(least_score)]
        corners, classes = sure[:, 2:] * np.array([truth.width, truth.height] * 2), sure[:, 1].astype(int)
        finds = match_boxes(truth, corners, classes)
        guess = [
            (names[class_id], Box(edges, f"{names[class_id]} {score:.2f}", *VERDICTS[verdict]), verdict)
            for edges, class_id, score, at in zip(corners.tolist(), classes, sure[:, 0].tolist(), finds)
            # Scores leave a crowd out, and a prediction that lies in it.
            if (verdict := "wrong" if at < 0 else "" if truth.is_crowd[at] else "right")
        ]
        boxes = [
            (names[class_id], Box(edges, names[class_id], *VERDICTS[verdict]), verdict)
            for number, (edges, class_id) in enumerate(zip(truth.corners.tolist(), truth.class_ids))
            if not truth.is_crowd[number] and (verdict := "right" if number in finds else "missed")
        ]
        yield _Predicted(index, boxes, guess)


def _shown(found: _Predicted, kind: str, source: Any) -> JsonRecord:
    sample, names = source.shown(found.index), source.label_names
    sides = (found.truth, found.guess)
    if kind == "boxes":
        image = sample["image"]
        scale = EDGE_OF_BOXES / max(image.size)
        pictures = [address_of(draw_boxes(image, [box for _, box, _ in side], scale), EDGE_OF_BOXES) for side in sides]
        sides_of = {"right": found.guess, "wrong": found.guess, "missed": found.truth}
        verdicts = {name: [each for each, _, verdict in sides_of[name] if verdict == name] for name in VERDICTS}
        return {"images": pictures, **verdicts}
    if kind == "mask":
        masks = (Image.fromarray(palette()[mask.astype(np.uint8)]) for mask in sides)
        return {
            "images": [address_of(each, EDGE) for each in (sample["image"].convert("RGB"), *masks)],
            "wrong": found.wrong,
        }
    shown = {"truth": names[found.truth], "prediction": names[found.guess], "score": found.confidence}
    if "image" in sample:
        return {**shown, "images": [address_of(sample["image"].convert("RGB"), EDGE)]}
    text = sample["text"]
    return {**shown, "text": text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]} ..."}


def _colours(found: list[_Predicted], names: tuple[str, ...]) -> list[tuple[str, str]]:
    """Return the name and the colour (`#rrggbb`) of each class in these masks."""
    masks = [mask for each in found for mask in (each.truth, each.guess)]
    return [
        (names[number] if 0 <= number < len(names) else "no class", class_colors()[number])
        for number in sorted({number for mask in masks for number in np.unique(mask).tolist()})
    ]
