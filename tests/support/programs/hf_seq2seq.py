"""A program as a user writes it, for two processes: evaluate and predict by Seq2SeqTrainer with generated texts, and
say what came of it.
"""

import json
import sys
from pathlib import Path
from typing import Any

from accel_train.hf import Seq2SeqTrainer
from tests.support.hf_seq2seq import collate, seq2seq_arguments, seq2seq_model, seq2seq_rows
from tests.support.processes import end_group


def main(folder: Path) -> None:
    """`folder/result.json` has what must not depend on the number of processes, for 7 and for 40 samples."""
    found: dict[str, Any] = {}
    for count in (7, 40):
        seen: list[int] = []

        def metrics(given: Any, seen: list[int] = seen) -> dict[str, float]:
            seen.append(len(given.predictions))
            return {"first": float(given.predictions[:, 1].sum())}

        args = seq2seq_arguments(folder / str(count), per_device_eval_batch_size=3)
        trainer = Seq2SeqTrainer(
            seq2seq_model(), args, collate, eval_dataset=seq2seq_rows(count), compute_metrics=metrics
        )
        evaluation = trainer.evaluate(max_length=9, num_beams=2)
        predicted = trainer.predict(seq2seq_rows(count))
        found[str(count)] = {
            "seen": list(seen),
            "loss": evaluation["eval_loss"],
            "first": evaluation["eval_first"],
            "predictions": predicted.predictions.tolist(),
            "labels": predicted.label_ids.tolist(),
        }
    if trainer.is_world_process_zero():
        (folder / "result.json").write_text(json.dumps(found))
    end_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
