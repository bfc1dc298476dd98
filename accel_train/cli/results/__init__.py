"""Types of the results that `--json` prints, one per command. The JSON Schema and its documentation page use them.

The package `cli.commands` computes the results. The modules here only declare types.
"""

from collections.abc import Mapping

from accel_train.cli.results import runs, training

RESULTS: Mapping[str, type] = {
    "finetune": training.FinetuneResult,
    "run": training.RunResult,
    "recipes": runs.RecipesResult,
    "init": runs.InitResult,
    "plan": training.PlanResult,
    "prepare": training.PrepareResult,
    "rehearse": training.RehearseResult,
    "find-lr": training.FindLrResult,
    "sweep": training.SweepResult,
    "evaluate": runs.EvaluateResult,
    "predict": runs.PredictResult,
    "generate": runs.GenerateResult,
    "chat": runs.ChatResult,
    "export": runs.ExportResult,
    "push": runs.PushResult,
    "report": runs.ReportResult,
    "watch": runs.WatchResult,
    "replay": runs.ReplayResult,
    "verify": training.VerifyResult,
    "doctor": runs.DoctorResult,
    "explain": runs.ExplainResult,
    "completion": runs.CompletionResult,
}
"""Type of each command's result."""
