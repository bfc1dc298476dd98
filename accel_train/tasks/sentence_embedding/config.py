"""The settings of `data` for sentence embeddings."""

from collections.abc import Mapping
from typing import Literal, Self

from pydantic import Field, model_validator

from accel_train.core.errors import SettingError
from accel_train.recipe.data import BlockData, Data, TextData
from accel_train.recipe.tasks import TEXT, TaskSpec
from accel_train.recipe.values import PositiveFloat, PositiveInt

EMBEDDING = "sentence_embedding"
"""Name of a text's vector in sentence-transformers, and in its ONNX graphs."""
PROMPTS_FILE = "config_sentence_transformers.json"
MARGIN = 0.5
SCALE = 20.0


class SentenceEmbeddingData(TextData, BlockData):
    """Settings of `data` for sentence embeddings."""

    pair_columns: tuple[str, ...] = ("anchor", "positive")
    """Columns of the anchor, its positive, and any hard negatives. With score_column: the two texts of a pair. One
    column: texts to predict vectors for. A column may be a template: `{title}. {body}`.
    """
    score_column: str | None = Field(default=None, examples=["score"])
    """Column with the similarity of a pair, as a number. Only the order of the numbers matters."""
    objective: Literal["auto", "ranking", "cosent", "triplet"] = "auto"
    """Loss. ranking: cross-entropy of the positive among all positives and hard negatives of the global batch. cosent:
    order of scored pairs, over all pairs of the global batch. triplet: margin between the positive and the hard
    negatives of a row. auto: cosent with score_column, otherwise ranking.
    """
    scale: PositiveFloat = SCALE
    """Factor of the cosine similarities in ranking and cosent; 1 / temperature."""
    symmetric: bool = False
    """Whether ranking also finds each positive's anchor among all anchors. The loss is the mean of both directions."""
    margin: PositiveFloat = MARGIN
    """triplet: margin between the cosine similarities of the positive and of a negative."""
    matryoshka_dims: tuple[PositiveInt, ...] = Field(default=(), examples=[[384, 128, 64]])
    """Numbers of leading dimensions that are trained as vectors of their own (Kusupati et al. 2022). Their losses are
    added. Default: all dimensions only.
    """
    pooling: Literal["auto", "mean", "cls", "last"] = "auto"
    """Vector of a text from the vectors of its tokens: their mean, the first one, or the last one. auto: as in
    the sentence-transformers folder of model.pretrained, otherwise mean.
    """
    anchor_prompt: str = Field(default="", examples=["query: "])
    """Text before each anchor. `model/` has it as the prompt `query`."""
    positive_prompt: str = Field(default="", examples=["passage: "])
    """Text before each positive and negative. `model/` has it as the prompt `document`."""

    column_prompts: tuple[Literal["query", "document"], ...] = Field(default=(), examples=[["query", "document"]])
    """Prompt of each of pair_columns: query (anchor_prompt) or document (positive_prompt). Default: query for the first
    column, document for the others. `predict` keeps the prompt that a column had in training.
    """

    @property
    def input_columns(self) -> tuple[str, ...]:
        return self.pair_columns

    @property
    def prompt_names(self) -> "tuple[Literal['query', 'document'], ...]":
        """Return `column_prompts`, with the default resolved."""
        rest: tuple[Literal["query", "document"], ...] = ("document",)
        return self.column_prompts or ("query", *rest * (len(self.pair_columns) - 1))

    @property
    def prompts(self) -> dict[str, str]:
        """Return the text before anchors (`query`), and before positives and negatives (`document`)."""
        return {"query": self.anchor_prompt, "document": self.positive_prompt}

    def as_trained(self, trained: Data) -> Self:
        """Return this section with the prompt that each column had in training; the default for other columns."""
        if self.column_prompts or not isinstance(trained, SentenceEmbeddingData):
            return self
        known = dict(zip(trained.pair_columns, trained.prompt_names, strict=True))
        names = zip(self.pair_columns, self.prompt_names, strict=True)
        return self.model_copy(update={"column_prompts": tuple(known.get(column, name) for column, name in names)})

    @property
    def loss_name(self) -> Literal["ranking", "cosent", "triplet"]:
        """Return the objective, with auto resolved."""
        if self.objective == "auto":
            return "ranking" if self.score_column is None else "cosent"
        return self.objective

    @model_validator(mode="after")
    def objective_fits_the_columns(self) -> Self:
        count, name = len(self.pair_columns), self.loss_name
        columns = f"data.pair_columns=[{', '.join(self.pair_columns)}]"
        problem, at, other = "", f"data.objective={self.objective}", "pair_columns"
        if not count:
            problem, at = "name at least one column", columns
        elif len(self.column_prompts) not in (0, count):
            problem, other = f"name a prompt for each of the {count} columns of data.pair_columns", "column_prompts"
            at = f"data.column_prompts=[{', '.join(self.column_prompts)}]"
        elif name == "cosent" and self.score_column is None and self.objective == "cosent" and count > 1:
            problem, other = "needs the similarity of each pair, so set data.score_column", "score_column"
        elif name != "cosent" and self.score_column is not None:
            problem, other = (
                f"does not use data.score_column={self.score_column}, so leave one of them out",
                "objective",
            )
            at = f"data.objective={name}"
        elif name == "cosent" and count > 2:
            problem, at = f"data.score_column scores pairs, but {count} columns are named; name two", columns
        elif name == "triplet" and count == 2:
            problem = "needs a hard negative in each row, so name its column as the third of data.pair_columns"
        elif len({*self.matryoshka_dims}) != len(self.matryoshka_dims):
            problem, other = "name each number once", "matryoshka_dims"
            at = f"data.matryoshka_dims={list(self.matryoshka_dims)}"
        if problem:
            raise SettingError(problem, at=at, settings=("data.objective", f"data.{other}"))
        return self

    def unread(self) -> Mapping[str, str]:
        losses = {"symmetric": ("ranking",), "margin": ("triplet",), "scale": ("ranking", "cosent")}
        reason = f"data.objective is {self.loss_name}"
        return {name: reason for name, reading in losses.items() if self.loss_name not in reading}

    def without_labels(self) -> Self:
        """Return this section for samples to predict."""
        return self.model_copy(update={"score_column": None})


SPEC = TaskSpec(
    where="accel_train.tasks.sentence_embedding.task:SentenceEmbedding",
    data=SentenceEmbeddingData,
    uses=TEXT | {"evaluate.num_examples"},
    targets="samples",
    gives="vector",
    learns="turn a text into a vector near the vectors of similar texts",
    takes="pairs of texts that belong together, or scored pairs",
    finetune=True,
    auto="AutoModel",
    library="sentence-transformers",
    pipeline="sentence-similarity",
    tags=("sentence-transformers", "sentence-similarity", "feature-extraction"),
    metrics=("ndcg_at_10", "mrr_at_10", "recall_at_1", "recall_at_10", "spearman", "pearson"),
    loss_is_global=True,
    evaluates_untrained=True,
)
