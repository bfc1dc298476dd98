"""The flags of all commands: what argparse knows, and a recipe's own settings, which it does not."""

import argparse
from collections.abc import Sequence
from difflib import get_close_matches
from typing import NoReturn

from accel_train import __version__

RECIPE_COMMANDS = {
    "run": ("--accept-changes",),
    "plan": ("--world-size", "--gpu", "--gpus-per-node", "--interconnect", "--mfu", "--no-data"),
    "evaluate": ("--data",),
    "predict": ("--out",),
    "find-lr": ("--min", "--max", "--steps", "--out"),
    "rehearse": ("--processes", "--steps"),
    "replay": ("--device", "--debug"),
    "verify": ("--resume-proof", "--processes", "--steps"),
}
"""Commands that take a recipe's settings as flags, with their own flags."""


class UserError(Exception):
    """A mistake in what the user gave: told in one line, without a traceback."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see {self.prog} --help")


def split_settings(arguments: Sequence[str], own: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments of the command itself, and the recipe's `--section.field VALUE`, which argparse does not know."""
    rest = list(arguments)
    ours: list[str] = []
    settings: list[str] = []
    while rest:
        word = rest.pop(0)
        name, equals, _ = word.partition("=")
        target = ours if name in own or not word.startswith("--") or word == "--help" else settings
        if target is settings and "." not in name and (near := get_close_matches(name, own, n=1, cutoff=0.8)):
            raise UserError(f"unknown flag {name}; did you mean {near[0]}?")
        target.append(word)
        if word.startswith("--") and not equals and word != "--help" and rest and not rest[0].startswith("--"):
            target.append(rest.pop(0))
    return ours, settings


def build_parser() -> argparse.ArgumentParser:
    """All commands and their own flags."""
    parser = _Parser(
        prog="accel-train", description="Train on any number of GPUs, guarded and resumable.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"accel-train {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    def add(name: str, about: str, usage: str | None = None) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=about, description=about, usage=usage, allow_abbrev=False)

    settings = "[--section.field VALUE ...]"
    run = add("run", "train; resumes by itself", f"accel-train run RECIPE [--accept-changes] {settings}")
    run.add_argument(
        "--accept-changes", action="store_true", help="go on from a checkpoint although the recipe has changed since"
    )
    plan = add(
        "plan",
        "say everything a run will be, before it costs anything",
        f"accel-train plan RECIPE [--world-size N] [--gpu NAME] [--gpus-per-node N] [--interconnect NAME] [--mfu X] [--no-data] {settings}",
    )
    evaluate = add(
        "evaluate",
        "metrics of a finished run, on the data it held out or on other data",
        f"accel-train evaluate RUN [--data WHAT] {settings}",
    )
    evaluate.add_argument(
        "--data", metavar="WHAT", help="other labelled data: a file, folder or data set; default: its own"
    )
    predict = add(
        "predict",
        "a table of what a finished run predicts, a row a sample",
        f"accel-train predict RUN [DATA] [--out FILE] {settings}",
    )
    predict.add_argument("--out", metavar="FILE", help="csv, jsonl or parquet; default: RUN/predictions.csv")
    export = add("export", "write the model into a folder for others, and make it smaller if asked")
    export.add_argument("--out", metavar="FOLDER", help="default: RUN/export, or RUN/export-int8")
    export.add_argument(
        "--quantize", choices=["int8"], help="int8: linear layers in a quarter of the memory (needs torchao)"
    )
    find_lr = add(
        "find-lr",
        "train with a rising learning rate, and say up to which the loss falls steeply",
        f"accel-train find-lr RECIPE [--min LR] [--max LR] [--steps N] [--out FOLDER] {settings}",
    )
    find_lr.add_argument("--min", type=float, default=1e-6, metavar="LR", help="where the rate begins; default: 1e-6")
    find_lr.add_argument("--max", type=float, default=1.0, metavar="LR", help="where it ends; default: 1")
    find_lr.add_argument("--steps", type=int, default=100, metavar="N", help="default: 100")
    find_lr.add_argument(
        "--out", metavar="FOLDER", help="for find-lr.json and find-lr.png; default: the recipe's output_dir"
    )
    for command in (evaluate, predict, export):
        command.add_argument("run", metavar="RUN", help="the output_dir of a finished run")
    predict.add_argument(
        "data", nargs="?", metavar="DATA", help="with or without labels; default: what the run held out"
    )
    rehearse = add(
        "rehearse",
        "step, evaluate, save, kill, run again: minutes on the real recipe, and whether the result is the same",
        f"accel-train rehearse RECIPE [--processes N] [--steps K] {settings}",
    )
    for command in (run, plan, find_lr, rehearse):
        command.add_argument(
            "recipe", metavar="RECIPE", help="a recipe file; --section.field VALUE overrides any of its settings"
        )
    plan.add_argument("--world-size", type=int, metavar="N", help="processes (GPUs) to plan for; default: those here")
    plan.add_argument("--gpu", metavar="NAME", help="the GPU to plan for: H200, A100, ...; default: the one here")
    plan.add_argument("--gpus-per-node", type=int, metavar="N", help="default: 8, or all where there are fewer")
    plan.add_argument(
        "--interconnect",
        metavar="NAME",
        help="between nodes: infiniband-ndr, roce-200, ethernet-100, ...; default: assumed",
    )
    plan.add_argument(
        "--no-data", action="store_true", help="read none: plan from sequence length and vocabulary alone"
    )
    plan.add_argument("--mfu", type=float, metavar="X", help="share of the peak that computing reaches; default: 0.35")
    generate = add("generate", "write text with a finished causal-lm run")
    generate.add_argument("run", metavar="RUN", help="the output_dir of a finished run")
    generate.add_argument("--prompt", default="", metavar="TEXT", help="what the text begins with")
    generate.add_argument("--max-new-tokens", type=int, default=200, metavar="N", help="default: 200")
    generate.add_argument(
        "--temperature", type=float, default=0.8, metavar="T", help="0: the likeliest token; default: 0.8"
    )
    generate.add_argument("--seed", type=int, default=0, metavar="S", help="default: 0")
    report = add("report", "write report.html (and PNGs) of one run, or a comparison of several")
    report.add_argument("runs", nargs="+", metavar="RUN", help="the output_dir of a run")
    report.add_argument("--out", metavar="FILE", help="where to write the HTML")
    replay = add(
        "replay",
        "compute an incident of a run again, module by module",
        f"accel-train replay INCIDENT [--device DEVICE] [--debug] {settings}",
    )
    replay.add_argument("incident", metavar="INCIDENT", help="a folder of RUN/incidents")
    replay.add_argument("--device", metavar="DEVICE", help="cpu or cuda; default: what there is")
    replay.add_argument(
        "--debug", action="store_true", help="stop in the debugger at the first module whose output is not finite"
    )
    verify = add(
        "verify",
        "check every checkpoint's digests, and say which one a resume would use",
        f"accel-train verify RUN [--resume-proof [--processes N] [--steps K] {settings}]",
    )
    verify.add_argument("run", metavar="RUN", help="the output_dir of a run")
    verify.add_argument(
        "--resume-proof",
        action="store_true",
        help="also resume it from copies of its newest checkpoint, once killed and once not, and compare",
    )
    for command in (rehearse, verify):
        command.add_argument(
            "--processes", type=int, metavar="N", help="default: the GPUs here; for --resume-proof, as many as it had"
        )
        command.add_argument("--steps", type=int, default=8, metavar="K", help="of the rehearsal; default: 8")
    add("doctor", "GPUs, driver, versions, precision, launcher, disk: what is wrong, and what to do")
    return parser
