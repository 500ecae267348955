"""Arguments of a forward call of single model types, as functions of their configuration."""

from collections.abc import Callable
from typing import Any

import torch


def _series(config: Any) -> dict[str, Any]:
    """Values, their times and which are observed, as long as the model looks back."""
    past = config.context_length + max(config.lags_sequence)
    return {
        "past_values": torch.randn(2, past),
        "past_time_features": torch.randn(2, past, config.num_time_features),
        "past_observed_mask": torch.ones(2, past),
        "future_values": torch.randn(2, config.prediction_length),
        "future_time_features": torch.randn(2, config.prediction_length, config.num_time_features),
    }


def _long(config: Any) -> dict[str, Any]:
    """Many channels of one length."""
    return {"past_values": torch.randn(2, config.context_length, config.num_input_channels)}


def _sight(config: Any) -> dict[str, Any]:
    """Words, and features of regions of an image."""
    return {
        "input_ids": torch.randint(5, 90, (2, 12)),
        "visual_feats": torch.randn(2, 9, config.visual_feat_dim),
        "visual_pos": torch.rand(2, 9, 4),
    }


def _sound(config: Any) -> dict[str, Any]:
    """Frames of a sound, all of which count."""
    frames = 2 * config.max_source_positions
    return {
        "input_features": torch.randn(2, config.num_mel_bins, frames),
        "input_features_mask": torch.ones(2, frames, dtype=torch.long),
    }


def _frames(width: int) -> Callable[[Any], dict[str, Any]]:
    """Frames of this width."""

    def made(config: Any) -> dict[str, Any]:
        mask = torch.ones(2, 64, dtype=torch.long)
        return {"input_features": torch.randn(2, 64, width)} | (
            {"input_features_mask": mask} if width == 560 else {}
        )

    return made


def _queries(config: Any) -> dict[str, Any]:
    """Queries, and what they look at."""
    return {
        "query_embeds": torch.randn(2, 12, config.hidden_size),
        "encoder_hidden_states": torch.randn(2, 9, config.encoder_hidden_size),
    }


def _latents(config: Any) -> dict[str, Any]:
    return {"latents": torch.randn(2, config.hidden_size, 12)}


def _shown(config: Any) -> dict[str, Any]:
    """Words that look at one image."""
    size = config.vision_config.image_size
    return {
        "input_ids": torch.randint(5, 60, (2, 12)),
        "pixel_values": torch.randn(2, 1, 3, size, size),
        "image_attention_mask": torch.ones(2, 12, 1),
    }


def _patched(width: int, *more: str, merge: int = 1) -> Callable[[Any], dict[str, Any]]:
    """Two images of 4 x 4 patches of this width, with further sizes by name."""

    def made(config: Any) -> dict[str, Any]:
        found = {"pixel_values": torch.randn(32, width), "grid_thw": torch.tensor([[1, 4, 4]] * 2)}
        return found | {name: torch.tensor([merge] * 2) for name in more}

    return made


def _crops(config: Any) -> dict[str, Any]:
    """Every patch an image of its own."""
    size = config.patch_size
    grid = torch.tensor([[1, 4, 4]] * 2)
    return {"pixel_values": torch.randn(32, 3, size, size), "grid_thw": grid}


def _merged_crops(config: Any) -> dict[str, Any]:
    size = config.patch_size * config.spatial_merge_size
    grid = torch.tensor([[1, 4, 4]] * 2)
    return {"pixel_values": torch.randn(32, size, size, 3), "image_grid_thw": grid}


def _placed(config: Any) -> dict[str, Any]:
    """Patches with the row and the column of each."""
    places = torch.stack(torch.meshgrid(torch.arange(6), torch.arange(6), indexing="ij"), -1)
    width = 3 * config.patch_size**2
    return {
        "pixel_values": torch.rand(2, 36, width),
        "pixel_position_ids": places.reshape(1, 36, 2).repeat(2, 1, 1),
    }


def _sized(config: Any) -> dict[str, Any]:
    """Patches of two images of 4 x 4 patches."""
    return {
        "pixel_values": torch.randn(1, 3, config.patch_size, 32 * config.patch_size),
        "target_sizes": torch.tensor([[4, 4]] * 2),
    }


def _several(config: Any) -> dict[str, Any]:
    """A word and the codes of a frame at every time."""
    return {"input_ids": torch.randint(0, 60, (2, 12, config.num_codebooks + 1))}


def _spoken(config: Any) -> dict[str, Any]:
    width = 4 * (config.subsampling_conv_channels[0] // 4)
    return {"input_features": torch.randn(2, 64, width), "attention_mask": torch.ones(2, 64).bool()}


def _coded(config: Any) -> dict[str, Any]:
    """Words, and the codes of a sound of every codebook."""
    own = getattr(config, "decoder", config)
    rows = torch.randint(0, 60, (2 * own.num_codebooks, 7))
    if own is config:
        return {"input_ids": rows, "encoder_hidden_states": torch.randn(2, 9, config.hidden_size)}
    return {"input_ids": torch.randint(5, 60, (2, 12)), "decoder_input_ids": rows}


def _pair(config: Any) -> dict[str, Any]:
    """Two grey images to match."""
    return {"pixel_values": torch.randn(1, 2, 3, 128, 128)}


def _voice(config: Any) -> dict[str, Any]:
    return {"input_features": torch.randn(2, config.num_mel_bins, 100),
            "input_features_mask": torch.ones(2, 100, dtype=torch.long)}  # fmt: skip


def _samples(config: Any) -> dict[str, Any]:
    return {"input_values": torch.randn(2, 1920)}


def _timed(config: Any) -> dict[str, Any]:
    """Words, and the time to which the model listened."""
    time = torch.randn(2, 1, config.hidden_size)
    return {"input_ids": torch.randint(5, 60, (2, 12)), "t_cond": time}


def _heard(config: Any) -> dict[str, Any]:
    width = config.input_feat_size
    return {"audio_mel": torch.randn(2, 64, width), "audio_mel_mask": torch.zeros(2, 64).bool()}


def _prompted(config: Any) -> dict[str, Any]:
    """An image, and an image with its segmentation as an example."""
    height, width = config.image_size
    image = torch.randn(2, 3, height // 2, width)
    return {"pixel_values": image, "prompt_pixel_values": image.flip(0),
            "prompt_masks": torch.randn(2, 3, height // 2, width)}  # fmt: skip


def _flat(config: Any) -> dict[str, Any]:
    return {
        "pixel_values": torch.randn(2, 16, 3 * config.patch_size**2),
        "pixel_attention_mask": torch.ones(2, 16, dtype=torch.long),
        "spatial_shapes": torch.tensor([[4, 4]] * 2),
    }


def _uncached(config: Any) -> dict[str, Any]:
    """Words, and no cache, with which the decoder attends all tokens."""
    return {"input_ids": torch.randint(5, 90, (2, 12)), "use_cache": False,
            "decoder_input_ids": torch.randint(5, 90, (2, 7))}  # fmt: skip


def _codebooks(config: Any) -> dict[str, Any]:
    """The codes of a sound of every codebook, the second of which is to come."""
    return {"input_ids": torch.randint(5, 60, (2, 12, 8)), "codebook_idx": 2}


def _picture(config: Any) -> dict[str, Any]:
    return {"pixel_values": torch.randn(2, 3, 64, 64)}


def _filmed(config: Any) -> dict[str, Any]:
    """Words, and the frames of one video: it takes no batch."""
    size, frames = config.max_img_size, config.num_frames
    return {"input_ids": torch.randint(5, 90, (1, 12)),
            "pixel_values": torch.randn(1, frames, 3, size, size)}  # fmt: skip


def _spectrogram(config: Any) -> dict[str, Any]:
    return {"input_features": torch.randn(2, 1, 1024, config.num_mel_bins)}


def _recordings(config: Any) -> dict[str, Any]:
    """Two sounds, one after the other, and their lengths before and after the convolutions."""
    return {"input_features": torch.randn(config.num_mel_bins, 128),
            "feature_lens": torch.tensor([64, 64]),
            "aftercnn_lens": torch.tensor([32, 32])}  # fmt: skip


def _past(config: Any) -> dict[str, Any]:
    past = torch.randn(2, 4 * config.patch_length)
    zeros = torch.zeros(2, 4 * config.patch_length, dtype=torch.long)
    freq = torch.zeros(2, 1, dtype=torch.long)
    return {"past_values": past, "past_values_padding": zeros, "freq": freq}


def _noise(config: Any) -> dict[str, Any]:
    width = config.hidden_size
    layers = len(config.target_layer_ids)
    return {
        "noise_embeds": torch.randn(2, 8, width),
        "context_hidden_states": torch.randn(2, 12, width * layers),
    }


def _filmed_words(config: Any) -> dict[str, Any]:
    """Words, and the frames of two videos."""
    sight = config.vision_config
    size = sight.image_size
    return {"input_ids": torch.randint(5, 90, (2, 12)),
            "pixel_values": torch.randn(2, sight.num_frames, 3, size, size)}  # fmt: skip


def _described_videos(config: Any) -> dict[str, Any]:
    """Two videos, and words with padding: without a mask of words, the text is not causal."""
    sight = config.vision_config
    size = sight.image_size
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, 9:] = 0
    return {"input_ids": torch.randint(5, 90, (2, 12)), "attention_mask": mask,
            "pixel_values_videos": torch.randn(2, sight.num_frames, 3, size, size)}  # fmt: skip


def _classes(config: Any) -> dict[str, Any]:
    """Two images; three classes to find in the first and two in the second, and a task for each."""
    made = {"pixel_values": torch.randn(2, 3, 64, 64), "classes_structure": torch.tensor([3, 2])}
    for name, rows in (("classes", 5), ("tasks", 2)):
        made[f"{name}_input_ids"] = torch.randint(5, 90, (rows, 7))
        made[f"{name}_attention_mask"] = torch.ones(rows, 7, dtype=torch.long)
    return made


def _task(config: Any) -> dict[str, Any]:
    task = torch.randint(5, 90, (2, config.task_seq_len))
    return {"pixel_values": torch.randn(2, 3, 64, 64), "task_inputs": task}


def _places(config: Any) -> dict[str, Any]:
    """The patches of two images of 4 x 4 patches, in one sequence."""
    size = config.patch_size
    grid = torch.tensor([[1, 4, 4]] * 2)
    return {"pixel_values": torch.randn(1, 32, 3, size, size), "grid_thw": grid}


def _features(config: Any) -> dict[str, Any]:
    return {"input_features": torch.randn(2, 64, config.feature_projection_input_dim)}


# Type or class of a model -> a function from its configuration to the arguments of a forward call.
INPUTS: dict[str, Callable[[Any], dict[str, Any]]] = {
    **dict.fromkeys(("autoformer", "informer", "time_series_transformer"), _series),
    **dict.fromkeys(("patchtst", "patchtsmixer"), _long),
    "lxmert": _sight,
    "tvp": _filmed,
    "fsmt": _uncached,
    "ClapAudioModel": _spectrogram,
    "Florence2VisionBackbone": _picture,
    **dict.fromkeys(("Qwen2_5OmniAudioEncoder", "Qwen3OmniMoeAudioEncoder"), _recordings),
    "BarkFineModel": _codebooks,
    "AudioFlamingo3Encoder": _sound,
    "FunAsrNanoEncoder": _frames(560),
    **dict.fromkeys(("GraniteSpeech5Encoder", "GraniteSpeech5ForCTC"), _frames(320)),
    "Blip2QFormerModel": _queries,
    **dict.fromkeys(("MimiDecoderModel", "PocketTTSAudioTokenizerDecoderModel"), _latents),
    "idefics": _shown,
    "omdet-turbo": _classes,
    "oneformer": _task,
    "PaddleOCRVisionModel": _places,
    "SeamlessM4TSpeechEncoder": _features,
    "xclip": _filmed_words,
    "videoprism": _described_videos,
    "Kimi_K25VisionModel": _crops,
    "Inkling2VisionModel": _merged_crops,
    **dict.fromkeys(("MuseGlimmerVisionModel", "MuseSparkVisionModel"), _patched(1176)),
    "VideoLlama3VisionModel": _patched(768, "merge_sizes"),
    "Gemma4VisionModel": _placed,
    **dict.fromkeys(
        ("MiniCPMOcrVisionModel", "MiniCPMV4_6VisionModel", "MiniCPMV4_7VisionModel"), _sized
    ),
    "kyutai_speech_to_text": _several,
    "Gemma4AudioModel": _spoken,
    "Gemma3nAudioEncoder": _heard,
    **dict.fromkeys(("MusicgenDecoder", "MusicgenModel", "MusicgenMelodyModel"), _coded),
    **dict.fromkeys(("musicgen", "musicgen_melody"), _coded),
    "efficientloftr": _pair,
    "Qwen3ASREncoder": _voice,
    "MuseSparkAudioModel": _samples,
    "VoxtralRealtimeTextModel": _timed,
    "SegGptModel": _prompted,
    "Siglip2VisionModel": _flat,
    "TimesFmModel": _past,
    "MuseGlimmerAssistantModel": _noise,
}
