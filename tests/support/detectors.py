"""Small detectors of each family that object detection accepts, for images of 64 pixels, and runs that train them."""

from pathlib import Path
from typing import Any

import yaml

from tests.support.runs import train_recipe

_MODELS = yaml.safe_load("""
resnet: &resnet {model_type: resnet, embedding_size: 8, hidden_sizes: [8, 8, 8, 8], depths: [1, 1, 1, 1],
  layer_type: basic, out_features: [stage2, stage3, stage4]}
hgnet: &hgnet
  model_type: hgnet_v2
  stem_channels: [3, 8, 8]
  embedding_size: 8
  hidden_sizes: [8, 8, 8, 8]
  stage_in_channels: [8, 8, 8, 8]
  stage_mid_channels: [8, 8, 8, 8]
  stage_out_channels: [8, 8, 8, 8]
  stage_num_blocks: [1, 1, 1, 1]
  stage_numb_of_layers: [1, 1, 1, 1]
  stage_kernel_size: [3, 3, 3, 3]
  stage_downsample: [false, true, true, true]
  stage_light_block: [false, false, false, false]
  out_features: [stage2, stage3, stage4]
decoder: &decoder {d_model: 32, encoder_layers: 1, decoder_layers: 2, encoder_attention_heads: 2,
  decoder_attention_heads: 2, encoder_ffn_dim: 16, decoder_ffn_dim: 16, num_queries: 7, dropout: 0.0}
last: &last {<<: *decoder, backbone_config: {<<: *resnet, out_features: [stage4]}}
real_time: &real_time {d_model: 16, encoder_hidden_dim: 16, encoder_in_channels: [8, 8, 8],
  decoder_in_channels: [16, 16, 16], num_queries: 7, encoder_layers: 1, encoder_ffn_dim: 16, decoder_ffn_dim: 16,
  decoder_layers: 2, encoder_attention_heads: 2, decoder_attention_heads: 2, hidden_expansion: 1.0, num_denoising: 0}
on_resnet: &on_resnet {<<: *real_time, backbone_config: {<<: *resnet, model_type: rt_detr_resnet}}
detectors:
  detr: {model_type: detr, <<: *last}
  detr of all layers: {model_type: detr, <<: *last, auxiliary_loss: true}
  table-transformer: {model_type: table-transformer, <<: *last, auxiliary_loss: true}
  conditional_detr: {model_type: conditional_detr, <<: *last, auxiliary_loss: true}
  deformable_detr of all layers: &deformable {model_type: deformable_detr, <<: *decoder, backbone_config: *resnet,
    num_feature_levels: 3, auxiliary_loss: true, with_box_refine: true}
  deformable_detr: {<<: *deformable, auxiliary_loss: false, with_box_refine: false}
  yolos: {model_type: yolos, hidden_size: 16, num_hidden_layers: 2, num_attention_heads: 2, intermediate_size: 16,
    image_size: [64, 64], patch_size: 16, num_detection_tokens: 7, hidden_dropout_prob: 0.0,
    attention_probs_dropout_prob: 0.0}
  rt_detr: {model_type: rt_detr, <<: *on_resnet}
  rt_detr_v2: {model_type: rt_detr_v2, <<: *on_resnet}
  d_fine: {model_type: d_fine, <<: *real_time, backbone_config: *hgnet, depth_mult: 1.0}
""")
DETECTORS: dict[str, dict[str, Any]] = _MODELS["detectors"]
YOLOS, DEFORMABLE = DETECTORS["yolos"], DETECTORS["deformable_detr of all layers"]

FAULTY = "tests.support.tasks.detection_faults:FaultyObjectDetection"
CROPS: dict[str, Any] = {"augment": {"scale_range": [1.5, 2.5], "horizontal_flip": 0.5}, "min_visible": 1.0}
"""Crops that lose many boxes, so some images have none."""


def sections_of(folder: Path, name: str = "run", model: Any = YOLOS, **sections: Any) -> dict[str, Any]:
    data = {"train": "digit-scenes", "image_size": 64, "num_workers": 0, **sections.pop("data", {})}
    return {
        "task": "object-detection",
        "output_dir": str(folder / name),
        "model": {"config": model},
        "data": data,
        "batch": {"global_batch_size": 8},
        "optimizer": {"learning_rate": 1e-3},
        "schedule": {"max_steps": 3},
        "precision": {"mixed_precision": "no"},
        "evaluate": {"every_steps": 0, "max_samples": 8},
        "checkpoint": {"every_steps": 0},
        "log": {"every_steps": 1},
        **sections,
    }


def train_boxes(
    folder: Path, name: str, processes: int = 1, per_device: int = 8, expect: int = 0, **sections: Any
) -> list[tuple[float, float]]:
    """Train; return each step's loss and gradient norm."""
    batch = {"global_batch_size": 8, "per_device_batch_size": per_device} | sections.pop("batch", {})
    recipe = sections_of(folder, name, **{"data": CROPS, **sections, "batch": batch})
    return train_recipe(recipe, processes, expect)
