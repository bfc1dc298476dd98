"""Types of the results that `--json` prints, one per command. The JSON Schema and its documentation page use them.

The package `cli.commands` computes the results. The modules here only declare types.
"""

from collections.abc import Mapping

from accel_train.cli.results import runs, training

RESULTS: Mapping[str, type] = {
    "run": training.RunResult,
    "finetune": training.FinetuneResult,
    "plan": training.PlanResult,
    "evaluate": runs.EvaluateResult,
    "predict": runs.PredictResult,
    "export": runs.ExportResult,
    "find-lr": training.FindLrResult,
    "rehearse": training.RehearseResult,
    "sweep": training.SweepResult,
    "generate": runs.GenerateResult,
    "chat": runs.ChatResult,
    "report": runs.ReportResult,
    "watch": runs.WatchResult,
    "replay": runs.ReplayResult,
    "verify": training.VerifyResult,
    "doctor": runs.DoctorResult,
    "recipes": runs.RecipesResult,
    "init": runs.InitResult,
    "explain": runs.ExplainResult,
    "completion": runs.CompletionResult,
}
"""Type of each command's result."""
