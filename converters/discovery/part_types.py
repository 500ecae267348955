"""Model types of the parts of a model, where a part of its configuration does not name its own.

`hf_config` adds them to every configuration that it reads. From the classes of transformers 5.23.
"""

from collections.abc import Mapping
from typing import Any

# Key of a part -> pairs MODEL=PART of the model type of a model, and that of its part.
_PARTS = {
    "acoustic_model_config": "higgs_audio_v2_tokenizer=dac xcodec=dac",
    "acoustic_tokenizer_encoder_config": "vibevoice_asr=vibevoice_acoustic_tokenizer_encoder",
    "adapter_config": "molmo2=molmo2_adapter",
    "asr_config": "nemotron3_5_transcribe_audio=nemotron3_5_transcribe_asr_audio",
    "audio_config": """
        audioflamingo3=audioflamingo3_encoder clap=clap_audio_model
        dots3_note=dots3_note_audio_encoder embedding_gemma2=gemma4_audio
        fun_asr_nano=fun_asr_nano_encoder gemma3n=gemma3n_audio gemma4=gemma4_audio
        gemma4_unified=gemma4_unified_audio glmasr=glmasr_encoder inkling_mm_model=inkling_audio
        moss_transcribe_diarize=moss_transcribe_diarize_audio muse_spark=muse_spark_audio
        nemo_speechlm=nemotron3_5_transcribe_audio
        nemotron3_diarization=nemotron3_diarization_audio nemotron_h_omni=parakeet_encoder
        pe_audio=pe_audio_encoder pe_audio_video_encoder=pe_audio_encoder
        phi4_multimodal=phi4_multimodal_audio qwen2_5_omni_thinker=qwen2_5_omni_audio_encoder
        qwen2_audio=qwen2_audio_encoder qwen3_asr=qwen3_asr_encoder
        qwen3_omni_moe_thinker=qwen3_omni_moe_audio_encoder vibevoice=vibevoice_acoustic_tokenizer
        voxtral=voxtral_encoder voxtral_realtime=voxtral_realtime_encoder
    """,
    "audio_encoder": "musicgen=encodec musicgen_melody=encodec",
    "audio_encoder_config": "moshi=mimi",
    "audio_video_config": "pe_audio_video=pe_audio_video_encoder",
    "bigvgan_config": "qwen2_5_omni_token2wav=qwen2_5_omni_bigvgan",
    "coarse_acoustics_config": "bark=coarse_acoustics",
    "codec_config": "bark=encodec csm=mimi kyutai_speech_to_text=mimi",
    "dac_config": "pe_audio_encoder=dac",
    "decoder": """
        encoder-decoder=bert musicgen=musicgen_decoder musicgen_melody=musicgen_melody_decoder
        speech-encoder-decoder=bert t5gemma2=t5gemma2_decoder t5gemma=t5_gemma_module
        vision-encoder-decoder=bert
    """,
    "decoder_config": """
        blt=blt_local_decoder canary=canary_decoder clvp=clvp_decoder dia=dia_decoder
        maskformer=detr
    """,
    "depth_decoder_config": "csm=csm_depth_decoder_model moshi=moshi_depth",
    "detector_config": "sam3_video=sam3",
    "detr_decoder_config": "sam3=sam3_detr_decoder sam3_lite_text=sam3_lite_text_detr_decoder",
    "detr_encoder_config": "sam3=sam3_detr_encoder sam3_lite_text=sam3_lite_text_detr_encoder",
    "diarization_config": "nemotron3_5_transcribe_audio=nemotron3_diarization",
    "diffusion_head_config": "vibevoice=vibevoice_diffusion",
    "dit_config": "pi0=gemma qwen2_5_omni_token2wav=qwen2_5_omni_dit",
    "encoder": """
        encoder-decoder=bert speech-encoder-decoder=wav2vec2 t5gemma2=t5gemma2_encoder
        t5gemma=t5_gemma_module vision-encoder-decoder=vit
    """,
    "encoder_config": """
        blt=blt_local_encoder canary=parakeet_encoder cohere_asr=parakeet_encoder
        deepseek_ocr2_vision=deepseek_ocr2_encoder dia=dia_encoder
        granite_speech5_ctc=granite_speech5_encoder granite_speech=granite_speech_encoder
        granite_speech_plus=granite_speech_plus_encoder lasr_ctc=lasr_encoder
        moonshine_streaming=moonshine_streaming_encoder
        nemotron3_5_asr=nemotron_asr_streaming_encoder
        nemotron_asr_streaming=nemotron_asr_streaming_encoder parakeet_ctc=parakeet_encoder
        parakeet_rnnt=parakeet_encoder parakeet_tdt=parakeet_encoder
        unlimited_ocr_vision=unlimited_ocr_vision_encoder
    """,
    "esmc_config": "esmfold2=esmc",
    "fine_acoustics_config": "bark=fine_acoustics",
    "fov_model_config": "depth_pro=dinov2",
    "geometry_encoder_config": """
        sam3=sam3_geometry_encoder sam3_lite_text=sam3_lite_text_geometry_encoder
    """,
    "global_config": "blt=blt_global_transformer",
    "head_config": "sapiens2=sapiens2_head",
    "high_res_vision_config": "deepseek_vl_hybrid=sam_vision_model",
    "image_codebook_config": "flava=flava_image_codebook",
    "image_config": "flava=flava_image_model",
    "image_model_config": "depth_pro=dinov2",
    "keypoint_detector_config": "lightglue=superpoint superglue=superpoint",
    "mask_decoder_config": """
        edgetam=edgetam_mask_decoder edgetam_video=edgetam_video_mask_decoder
        sam2=sam2_mask_decoder sam2_video=sam2_video_mask_decoder sam3=sam3_mask_decoder
        sam3_lite_text=sam3_lite_text_mask_decoder sam3_tracker=sam3_tracker_mask_decoder
        sam3_tracker_video=sam3_tracker_video_mask_decoder sam=sam_mask_decoder
        sam_hq=sam_hq_mask_decoder
    """,
    "model_config": "fastspeech2_conformer_with_hifigan=fastspeech2_conformer",
    "multimodal_config": "flava=flava_multimodal_model",
    "patch_model_config": "depth_pro=dinov2",
    "patcher_config": "blt=blt_patcher",
    "perceiver_config": "idefics2=idefics2_perceiver idefics=idefics_perciever",
    "projector_config": "granite_speech=blip_2_qformer granite_speech_plus=blip_2_qformer",
    "prompt_encoder_config": """
        edgetam=edgetam_prompt_encoder edgetam_video=edgetam_video_prompt_encoder
        sam2=sam2_prompt_encoder sam2_video=sam2_video_prompt_encoder
        sam3_tracker=sam3_tracker_prompt_encoder
        sam3_tracker_video=sam3_tracker_video_prompt_encoder sam=sam_prompt_encoder
        sam_hq=sam_hq_prompt_encoder
    """,
    "qformer_config": """
        blip-2=blip_2_qformer granite4_vision=blip_2_qformer instructblip=instructblip_qformer
        instructblipvideo=instructblipvideo_qformer
    """,
    "sam_config": """
        deepseek_ocr2_vision=deepseek_ocr2_sam_vision_model
        unlimited_ocr_vision=unlimited_ocr_sam_vision_model
    """,
    "semantic_config": "bark=semantic",
    "semantic_model_config": """
        higgs_audio_v2_tokenizer=hubert neucodec=wav2vec2-bert
        vibevoice=vibevoice_acoustic_tokenizer_encoder xcodec2=wav2vec2-bert xcodec=hubert
    """,
    "semantic_tokenizer_encoder_config": "vibevoice_asr=vibevoice_acoustic_tokenizer_encoder",
    "speech_config": "clvp=clvp_encoder",
    "talker_config": "qwen2_5_omni=qwen2_5_omni_talker",
    "text_config": """
        aimv2=aimv2_text_model align=align_text_model altclip=altclip_text_model aria=aria_text
        audioflamingo3=qwen2 aya_vision=cohere2 blip-2=opt blip=blip_text_model
        bridgetower=bridgetower_text_model chinese_clip=chinese_clip_text_model
        clap=clap_text_model clip=clip_text_model clipseg=clipseg_text_model clvp=clvp_encoder
        cohere2_vision=cohere2 cohere_compass=cohere_compass_text cosmos3_edge=cosmos3_edge_text
        cosmos3_omni=qwen3_vl_text deepseek_ocr2=deepseek_ocr2_text deepseek_vl=llama
        deepseek_vl_hybrid=llama diffusion_gemma=diffusion_gemma_text dots3_note=dots3_note_text
        embedding_gemma2=embedding_gemma2_text emu3=emu3_text_model
        ernie4_5_vl_moe=ernie4_5_vl_moe_text fast_vlm=qwen2 flava=flava_text_model florence2=bart
        fuyu=persimmon gemma3=gemma3_text gemma3n=gemma3n_text gemma4=gemma4_text
        gemma4_unified=gemma4_unified_text gemma4_unified_assistant=gemma4_unified_text
        glm46v=glm4v_text glm4v=glm4v_text glm4v_moe=glm4v_moe_text glm5_next=glm5_next_text
        glm_image=glm_image_text glm_ocr=glm_ocr_text glmasr=llama glmga=glm4v_text got_ocr2=qwen2
        granite4_vision=granite4_vision_text granite_docling=granite_docling_text
        granite_speech=granite granite_speech_plus=granite grounding-dino=bert
        groupvit=groupvit_text_model hunyuan_vl=hunyuan_vl_text hyperclovax_vision_v2=hyperclovax
        idefics2=mistral idefics3=llama inkling2=inkling2_text inkling_mm_model=inkling_text
        instructblip=opt instructblipvideo=opt internvl=qwen2 janus=llama jev=qwen3_5_text
        kimi_k25=deepseek_v3 kosmos-2.5=kosmos_2_5_text_model kosmos-2=kosmos_2_text_model
        lfm2_vl=lfm2 lfm3_vl=lfm3 lighton_ocr=qwen3 llama4=llama4_text llava=llama
        llava_next=llama llava_next_video=llama llava_onevision=qwen2
        metaclip_2=metaclip_2_text_model minicpm_ocr=qwen3_5_text minicpmv4_6=qwen3_5_text
        minicpmv4_7=qwen3_5_text minimax_m3_vl=minimax_m3_vl_text mistral3=mistral
        mistral_large4=mistral_large4_text mllama=mllama_text_model mm-grounding-dino=bert
        modernvbert=modernbert molmo2=molmo2_text moss_transcribe_diarize=qwen3
        muse_glimmer=muse_glimmer_text muse_spark=muse_spark_text musicflamingo=qwen2
        nemo_speechlm=nemotron_h nemotron_h_omni=nemotron_h omdet-turbo=clip_text_model
        ovis2=qwen2 owlv2=owlv2_text_model owlvit=owlvit_text_model paddleocr_vl=paddleocr_vl_text
        paligemma=gemma pe_audio=modernbert pe_audio_video=modernbert pe_video=modernbert
        perception_lm=llama pix2struct=pix2struct_text_model pp_chart2table=qwen2
        pp_formulanet=pp_formulanet_text qianfan_ocr=qwen3 qwen2_5_omni_thinker=qwen2_5_omni_text
        qwen2_5_vl=qwen2_5_vl_text qwen2_audio=qwen2 qwen2_vl=qwen2_vl_text qwen3_5=qwen3_5_text
        qwen3_5_moe=qwen3_5_moe_text qwen3_asr=qwen3 qwen3_omni_moe_thinker=qwen3_omni_moe_text
        qwen3_vl=qwen3_vl_text qwen3_vl_moe=qwen3_vl_moe_text qwen4_exp=qwen4_exp_text
        sam3=clip_text_model sam3_lite_text=sam3_lite_text_text_model shieldgemma2=gemma3_text
        siglip2=siglip2_text_model siglip=siglip_text_model smolvlm=llama step3p7=step3p5
        t5gemma2_encoder=t5gemma2_text tipsv2=tipsv2_text_model ultravbert=ultrabert
        unlimited_ocr=unlimited_ocr_text vibevoice=qwen2 vibevoice_asr=qwen2 video_llama_3=qwen2
        video_llava=llama videoprism=videoprism_text_model vipllava=llama
        vision-text-dual-encoder=bert voxtral=llama voxtral_realtime=voxtral_realtime_text
        xclip=xclip_text_model
    """,
    "text_encoder": "musicgen=t5 musicgen_melody=t5",
    "thinker_config": "qwen2_5_omni=qwen2_5_omni_thinker qwen3_omni_moe=qwen3_omni_moe_thinker",
    "token2wav_config": "qwen2_5_omni=qwen2_5_omni_token2wav",
    "tracker_config": "sam3_video=sam3_tracker_video",
    "video_config": "pe_audio_video_encoder=pe_video_encoder pe_video=pe_video_encoder",
    "vision_config": """
        aimv2=aimv2_vision_model align=align_vision_model altclip=altclip_vision_model
        aria=idefics3_vision aya_vision=siglip_vision_model blip-2=blip_2_vision_model
        blip=blip_vision_model bridgetower=bridgetower_vision_model
        chinese_clip=chinese_clip_vision_model clip=clip_vision_model clipseg=clipseg_vision_model
        cohere2_vision=siglip_vision_model cohere_compass=cohere_compass_vision
        cosmos3_edge=cosmos3_edge_vision cosmos3_omni=qwen3_vl_vision
        deepseek_ocr2=deepseek_ocr2_vision deepseek_vl=siglip_vision_model
        deepseek_vl_hybrid=siglip_vision_model diffusion_gemma=gemma4_vision
        dots3_note=dots3_note_vision_encoder edgetam=edgetam_vision_model
        edgetam_video=sam2_vision_model embedding_gemma2=gemma4_vision
        ernie4_5_vl_moe=ernie4_5_vl_moe_vision exaone4_5=exaone4_5_vision fast_vlm=timm_wrapper
        florence2=florence_vision gemma3=siglip_vision_model gemma3n=gemma3n_vision
        gemma4=gemma4_vision gemma4_unified=gemma4_unified_vision git=git_vision_model
        glm46v=glm4v_vision glm4v=glm4v_vision glm4v_moe=glm4v_moe_vision
        glm5_next=glm5_next_vision glm_image=glm_image_vision glm_ocr=glm_ocr_vision
        glmga=glm4v_vision got_ocr2=got_ocr2_vision granite4_vision=clip_vision_model
        granite_docling=granite_docling_vision groupvit=groupvit_vision_model
        hunyuan_vl=hunyuan_vl_vision hyperclovax_vision_v2=qwen2_5_vl_vision
        idefics2=idefics2_vision idefics3=idefics3_vision idefics=idefics_vision
        inkling2=inkling2_vision inkling_mm_model=inkling_vision
        instructblip=instructblip_vision_model instructblipvideo=instructblipvideo_vision_model
        internvl=internvl_vision janus=janus_vision_model kimi_k25=kimi_k25_vision
        kosmos-2.5=kosmos_2_5_vision_model kosmos-2=kosmos_2_vision_model
        lfm2_vl=siglip2_vision_model lfm3_vl=lfm3_vl_vision lighton_ocr=pixtral
        llama4=llama4_vision_model llava=clip_vision_model llava_next=clip_vision_model
        llava_next_video=clip_vision_model llava_onevision=siglip_vision_model
        metaclip_2=metaclip_2_vision_model minicpm_ocr=minicpm_ocr_vision
        minicpmv4_6=minicpmv4_6_vision minicpmv4_7=minicpmv4_7_vision
        minimax_m3_vl=minimax_m3_vl_vision mistral3=pixtral mistral_large4=pixtral
        mllama=mllama_vision_model modernvbert=siglip_vision_model molmo2=molmo2_vision
        muse_glimmer=muse_glimmer_vision muse_spark=muse_spark_vision ovis2=ovis2_vision
        owlv2=owlv2_vision_model owlvit=owlvit_vision_model paddleocr_vl=paddleocr_vl_vision
        paligemma=siglip_vision_model pe_video_encoder=timm_wrapper perception_lm=timm_wrapper
        phi4_multimodal=phi4_multimodal_vision pix2struct=pix2struct_vision_model
        pp_chart2table=pp_chart2table_vision pp_formulanet=pp_formulanet_vision
        qianfan_ocr=qianfan_ocr_vision qwen2_5_omni_thinker=qwen2_5_omni_vision_encoder
        qwen2_5_vl=qwen2_5_vl_vision qwen2_vl=qwen2_vl_vision qwen3_5=qwen3_5_vision
        qwen3_5_moe=qwen3_5_moe_vision qwen3_omni_moe_thinker=qwen3_omni_moe_vision_encoder
        qwen3_vl=qwen3_vl_vision qwen3_vl_moe=qwen3_vl_moe_vision qwen4_exp=qwen4_exp_vision
        sam2=sam2_vision_model sam2_video=sam2_vision_model sam3=sam3_vision_model
        sam3_lite_text=sam3_vision_model sam3_tracker=sam3_vision_model
        sam3_tracker_video=sam3_vision_model sam=sam_vision_model sam_hq=sam_hq_vision_model
        shieldgemma2=siglip_vision_model siglip2=siglip2_vision_model siglip=siglip_vision_model
        slanext=slanext_vision smolvlm=smolvlm_vision step3p7=step3p5_vision
        t5gemma2_encoder=siglip_vision_model tipsv2=tipsv2_vision_model
        ultravbert=siglip_vision_model unlimited_ocr=unlimited_ocr_vision
        video_llama_3=video_llama_3_vision video_llava=clip_vision_model
        videoprism=videoprism_vision_model vipllava=clip_vision_model vision-text-dual-encoder=vit
        xclip=xclip_vision_model
    """,
    "vlm_config": "colmodernvbert=modernvbert colpali=paligemma colqwen2=qwen2_vl pi0=paligemma",
    "vocoder_config": "fastspeech2_conformer_with_hifigan=fastspeech2_conformer_hifigan",
    "vq_config": """
        chameleon=chameleon_vqgan emu3=emu3_vqgan glm_image=glm_image_vqmodel janus=janus_vqgan
    """,
    "word_timestamp_config": "nemo_speechlm=nemotron3_5_transcribe_word_timestamp",
}  # fmt: skip
# Model type -> the model types of its parts, by key.
OF_TYPES: dict[str, dict[str, str]] = {}
for _key, _pairs in _PARTS.items():
    for _model, _, _part in (pair.partition("=") for pair in _pairs.split()):
        OF_TYPES.setdefault(_model, {})[_key] = _part


# Model types whose text model has its settings at the top of older files, which have no text_config.
_FLAT = frozenset(["fuyu", "paddleocr_vl", "qwen2_5_vl", "qwen2_vl"])


def filled(content: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration whose parts have the model types that its class gives them.

    Parts keep a model type of their own, unless it is the model type of the whole: older files
    repeat that in their parts.

    >>> filled({"model_type": "gemma3", "text_config": {"num_hidden_layers": 2}})["text_config"]
    {'num_hidden_layers': 2, 'model_type': 'gemma3_text'}
    """
    found, whole = dict(content), content.get("model_type")
    types = OF_TYPES.get(str(whole), {})
    for key, part in content.items():
        if not isinstance(part, dict):
            continue
        stated = part.get("model_type")
        if kind := types.get(key, stated) if stated in (None, "", whole) else stated:
            found[key] = filled(part | {"model_type": kind})
    return found


def of_top(content: Mapping[str, Any]) -> str:
    """The model type of the settings at the top of a configuration, or "".

    In older files of some models, these are the settings of the text model.

    >>> of_top({"model_type": "qwen2_vl", "num_attention_heads": 12})
    'qwen2_vl_text'
    """
    whole = str(content.get("model_type") or "")
    if whole in _FLAT and not isinstance(content.get("text_config"), dict):
        return OF_TYPES[whole]["text_config"]
    return whole
