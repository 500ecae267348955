"""Head counts that classes of transformers 5.23 have where a nested configuration lacks the key.

`save_pretrained` omits a count of a nested configuration that equals the default of its class, as in
the text_config of Gemma 3 and LLaVA. It always writes the counts of the outermost configuration.
"""

from collections.abc import Container
from typing import Any

# Key -> pairs of a count, and the model types whose class has it under this key.
_DEFAULTS: dict[str, tuple[tuple[int, str], ...]] = {
    "num_attention_heads": (
        (1, "emu3_vqgan sam2_hiera_det_model"),
        (2, "vits"),
        (4, """
            electra embedding_gemma2_text fun_asr_nano_encoder groupvit_text_model lightglue
            mobilebert mobilevit patchtst superglue
        """),
        (6, "aimv2_text_model dinov3_vit groupvit_vision_model nanochat"),
        (8, """
            aimv2_vision_model blip_text_model canary_decoder clip_text_model clipseg_text_model
            cohere_asr csm_depth_decoder_model diffusion_gemma_text doge edgetam_mask_decoder
            edgetam_video_mask_decoder efficientloftr gemma2 gemma3_text gemma3n_text gemma4_audio
            gemma4_text gemma4_unified_text granite_speech5_encoder lasr_encoder mask2former
            maskformer metaclip_2_text_model mimi mimi_decoder mimi_encoder moonshine_streaming
            moonshine_streaming_encoder nemotron3_diarization_audio nemotron_asr_streaming_encoder
            oneformer ovis2_vision owlv2_text_model owlvit_text_model parakeet_encoder
            pocket_tts_audio_tokenizer pocket_tts_audio_tokenizer_decoder
            pocket_tts_audio_tokenizer_encoder pp_ocrv5_mobile_rec pp_ocrv5_server_rec
            pp_ocrv6_small_rec sam2_mask_decoder sam2_video_mask_decoder sam3_detr_decoder
            sam3_detr_encoder sam3_geometry_encoder sam3_lite_text_detr_decoder
            sam3_lite_text_detr_encoder sam3_lite_text_geometry_encoder sam3_lite_text_mask_decoder
            sam3_lite_text_text_model sam3_mask_decoder sam3_tracker_mask_decoder
            sam3_tracker_video_mask_decoder sam_hq_mask_decoder sam_mask_decoder t5_gemma_module
            t5gemma2_decoder t5gemma2_text vaultgemma xclip_text_model zaya
        """),
        (10, "nemotron3_5_transcribe_asr_audio recurrent_gemma unlimited_ocr_text"),
        (12, """
            align_text_model altclip_vision_model audio-spectrogram-transformer beit bert big_bird
            blip_2_qformer blip_vision_model blt_patcher bridgetower bridgetower_text_model bros
            camembert canine chinese_clip_text_model chinese_clip_vision_model clap_text_model
            clip_vision_model clipseg_vision_model clvp_encoder convbert data2vec-audio
            data2vec-text data2vec-vision deberta deepseek_ocr2_sam_vision_model deit dinov2
            dinov2_with_registers dpr dpt ernie esm eurobert flava_image_model
            flava_multimodal_model flava_text_model gemma4_vision git git_vision_model
            got_ocr2_vision gradium_phonon_tts granite_docling_vision gte hrm_text hubert ibert
            idefics2_vision ijepa instructblip_qformer instructblipvideo_qformer layoutlm
            layoutlmv2 layoutlmv3 layoutxlm lilt longformer luke lw_detr_vit lxmert markuplm
            metaclip_2_vision_model mgp-str minicpm_ocr_vision minicpmv4_6_vision
            minicpmv4_7_vision modernbert modernbert-decoder mpnet mra nomic_bert nystromformer opt
            owlv2_vision_model owlvit_vision_model pix2struct_vision_model pp_chart2table_vision
            pp_formulanet_vision reformer rf_detr_dinov2 roberta roberta-prelayernorm roc_bert
            roformer sam_hq_vision_model sam_vision_model sew sew-d siglip2_text_model
            siglip2_vision_model siglip_text_model siglip_vision_model slanext_vision splinter
            squeezebert tapas timesformer tipsv2_text_model tipsv2_vision_model tvp unispeech
            unispeech-sat unlimited_ocr_sam_vision_model video_llama_3_vision videomae
            videoprism_text_model videoprism_vision_model vilt visual_bert vit vit_mae vit_msn
            vitdet vitpose_backbone vivit wav2vec2 wav2vec2-conformer wavlm xclip_vision_model
            xlm-roberta xmod yolos yoso
        """),
        (14, """
            openai_privacy_filter pe_audio_encoder pe_audio_video_encoder pe_video_encoder
        """),
        (16, """
            afmoe altclip_text_model bert-generation biogpt blip_2_vision_model
            blt_global_transformer blt_local_decoder blt_local_encoder clvp_decoder
            cosmos3_edge_text cosmos3_edge_vision dia_decoder dia_encoder eomt eomt_dinov3 ernie4_5
            gemma glm_ocr_text granite_docling_text hunyuan_vl_vision idefics3_vision
            idefics_vision inkling2_vision inkling_vision instructblip_vision_model
            instructblipvideo_vision_model internvl_vision janus_vision_model jina_embeddings_v3
            kimi_k25_vision kosmos_2_vision_model lfm3 lfm3_vl_vision llama4_vision_model
            megatron-bert minimax_m3_vl_vision mlcd_vision_model molmo2_adapter molmo2_vision
            moshi_depth moss_transcribe_diarize_audio muse_glimmer_vision muse_spark_vision
            musicgen_decoder musicgen_melody_decoder nemotron3_5_transcribe_word_timestamp neomme
            neucodec olmoe paddleocr_vl_text paddleocr_vl_vision phi4_multimodal_audio
            phi4_multimodal_vision pixio pixtral pocket_tts qianfan_ocr_vision qwen2_5_omni_dit
            qwen2_moe qwen3_5_moe_text qwen3_5_text qwen3_next qwen3_omni_moe_talker_code_predictor
            qwen3_omni_moe_talker_text qwen3_vl_moe_text qwen4_exp_text radio sam3_vit_model
            sapiens2 seggpt smollm3 smolvlm_vision step3p5_vision timesfm timesfm2_5
            unlimited_ocr_vision_encoder videomt vjepa2 wav2vec2-bert xcodec2 youtu zamba
        """),
        (18, "rembert"),
        (20, """
            audioflamingo3_encoder bitnet dots3_note_audio_encoder ernie4_5_moe
            ernie4_5_vl_moe_text glm4_moe_lite glmasr_encoder granite_swa helium voxtral_encoder
        """),
        (24, """
            deberta-v2 dots3_note_vision_encoder higgs_audio_v2 kosmos_2_5_vision_model starcoder2
        """),
        (26, "jais2"),
        (28, "qwen2_5_omni_talker qwen2_5_omni_text qwen3_omni_moe_text"),
        (30, "olmo_hybrid"),
        (32, """
            apertus arcee aria_text axk2 bailing_hybrid bamba chameleon cpmant csm
            deepseek_ocr2_encoder deepseek_ocr2_text deepseek_v2 diffllama dots1 emu3_text_model
            evolla exaone4 exaone_moe falcon_h1 flex_olmo flint glm glm4 glm4v_text glm_image_text
            gpt_neox_japanese granite granite4_vision_text granitemoe granitemoe_swa
            granitemoehybrid granitemoeshared hunyuan_v1_dense hunyuan_v1_moe hunyuan_vl_text hy_v4
            hyperclovax idefics internlm3 jamba jetmoe kimi_linear kyutai_speech_to_text lfm2
            lfm2_moe llama mellum minimax ministral ministral3 mistral mistral4 mixtral
            mllama_text_model molmo2_text moshi muse_glimmer_assistant muse_glimmer_text nemotron_h
            olmo olmo2 olmo3 phi phi3 phi4_multimodal phimoe qwen2 qwen3 qwen3_moe qwen3_vl_text
            stablelm ultrabert voxtral_realtime_encoder voxtral_realtime_text xlm-roberta-xl zamba2
        """),
        (40, "esmc iquestcoder llama4_text minicpm3"),
        (48, "beam cwm inkling2_text kolibri1 laguna minimax_m2 nemotron"),
        (64, """
            albert axk1 cohere cohere2 cohere2_moe cohere_compass_text deepseek_v4 glm5_next_text
            glm_moe_dsa gpt_neox gpt_oss hy_v3 inkling_text longcat_flash mimo_v2_flash
            minimax_m3_vl_text mistral_large4_text persimmon qwen2_5_vl_text qwen2_vl_text
            solar_open step3p5
        """),
        (71, "falcon"),
        (80, "seed_oss"),
        (96, "glm4_moe glm4v_moe_text"),
        (128, "deepseek_v3 deepseek_v32 dots3_note_text muse_spark_text"),
    ),
    "n_head": (
        (1, "decision_transformer"),
        (8, "bloom imagegpt"),
        (12, "funnel gpt2 gpt_bigcode openai-gpt"),
        (16, "codegen ctrl gptj xlnet"),
    ),
    "num_heads": (
        (6, "mt5 umt5"),
        (8, "granite_speech_encoder granite_speech_plus_encoder longt5 pop2piano t5"),
        (12, """
            coarse_acoustics fine_acoustics glm4v_moe_vision glm4v_vision pix2struct_text_model
            semantic switch_transformers
        """),
        (16, """
            cohere_compass_vision ernie4_5_vl_moe_vision exaone4_5_vision glm5_next_vision
            glm_image_vision glm_ocr_vision gpt_neo qwen2_5_omni_vision_encoder qwen2_5_vl_vision
            qwen2_vl_vision qwen3_5_moe_vision qwen3_5_vision qwen3_omni_moe_vision_encoder
            qwen3_vl_moe_vision qwen3_vl_vision qwen4_exp_vision udop
        """),
    ),
    "n_heads": (
        (12, "distilbert"),
        (16, "dbrx flaubert mpt xlm"),
    ),
    "attention_heads": (
        (16, "kosmos_2_5_text_model mllama_vision_model xglm"),
        (32, "kosmos_2_text_model"),
    ),
}  # fmt: skip
# Model type -> the key of the head count in its configuration, and the count without that key.
OF_TYPES = {
    name: (key, count)
    for key, rows in _DEFAULTS.items()
    for count, names in rows
    for name in names.split()
}


def filled(content: Any, keys: Container[str]) -> Any:
    """A configuration whose nested parts have the counts of their classes.

    `keys`: keys of head counts; a part with one of them is left as it is.

    >>> filled({"text_config": {"model_type": "gemma3_text"}}, ["num_attention_heads"])
    {'text_config': {'model_type': 'gemma3_text', 'num_attention_heads': 8}}
    """
    if not isinstance(content, dict):
        return content
    found = dict(content)
    for name, part in content.items():
        if isinstance(part, dict):
            found[name] = filled(part, keys)
            default = OF_TYPES.get(str(part.get("model_type")))
            if default is not None and not any(key in keys for key in part):
                found[name][default[0]] = default[1]
    return found
