"""Table from the model_type of a config.json to the families of the model's attention blocks.

tests/model_types.py generates it from the default configuration of every type that
transformers 5 builds, with the names in memory and on disk.

`architectures` is a separate table by model_type. That table is written by hand from the sources of
the models and lists the computations around the blocks; this one lists where the blocks are. A new
version of transformers regenerates this table and leaves the other unchanged.
"""

MODEL_TYPES: dict[str, str] = {
    "Gemma 2": (
        "beam embedding_gemma2 embedding_gemma2_text gemma2 gemma3 gemma3_text gemma3n_text "
        "gemma4 gemma4_text gemma4_unified gemma4_unified_text muse_glimmer muse_glimmer_text "
        "muse_spark muse_spark_text shieldgemma2 t5gemma t5gemma2 timesfm2_5 vaultgemma"
    ),
    "Falcon": "falcon",
    "StarCoder": "gpt_bigcode",
    "Phi-3": "phi3 phi4_multimodal",
    "BERT": (
        "align altclip bert bert-generation big_bird blip bridgetower bros camembert canine "
        "chinese_clip clap convbert data2vec-text dpr electra ernie git grounding-dino ibert "
        "layoutlm layoutlmv3 lilt longformer luke lxmert markuplm megatron-bert "
        "mm-grounding-dino mobilebert mra nystromformer rembert roberta roberta-prelayernorm "
        "roc_bert roformer splinter tapas vision-encoder-decoder vision-text-dual-encoder "
        "visual_bert xlm-roberta xlm-roberta-xl xmod yoso"
    ),
    "LXMERT": "lxmert",
    "DeBERTa": "deberta",
    "ALBERT": "albert tvp",
    "SegFormer, PVT": "glpn pvt segformer",
    "PVT v2": "pvt_v2",
    "Swin": (
        "clap donut-swin grounding-dino mask2former maskformer maskformer-swin "
        "mm-grounding-dino oneformer swin"
    ),
    "Perceiver": "perceiver",
    "ViT (transformers 4)": (
        "audio-spectrogram-transformer beit blip-2 blip_2_qformer data2vec-vision deit "
        "depth_pro dinov2 dinov2_with_registers dpt flava granite_speech granite_speech_plus "
        "ijepa instructblip instructblipvideo pixio rf_detr videomae vilt "
        "vision-encoder-decoder vision-text-dual-encoder vit vit_mae vit_msn vivit yolos"
    ),
    "ViT (transformers 5)": (
        "audio-spectrogram-transformer beit deit ijepa lighton_ocr mistral3 mistral_large4 "
        "pixio pixtral sam3 sam3_lite_text sam3_tracker sam3_tracker_video sam3_video "
        "sam3_vision_model sam3_vit_model videoprism vision-encoder-decoder "
        "vision-text-dual-encoder vit vit_mae vit_msn vivit"
    ),
    "timm": (
        "cohere_compass_vision cosmos3_omni dots3_note edgetam_video ernie4_5_vl_moe exaone4_5 "
        "exaone4_5_vision glm46v glm4v glm4v_moe glm4v_moe_vision glm4v_vision glm5_next "
        "glm5_next_vision glm_image glm_image_vision glm_ocr glm_ocr_vision glmga "
        "hyperclovax_vision_v2 mgp-str nemotron_h_omni qwen2_5_vl qwen2_5_vl_vision qwen2_vl "
        "qwen3_5 qwen3_5_moe qwen3_5_moe_vision qwen3_5_vision qwen3_omni_moe_thinker qwen3_vl "
        "qwen3_vl_moe qwen3_vl_moe_vision qwen3_vl_vision qwen4_exp_vision radio sam2 "
        "sam2_hiera_det_model sam2_video sam2_vision_model tipsv2 tipsv2_vision_model "
        "unlimited_ocr"
    ),
    "GPT-2": "decision_transformer gpt-sw3 gpt2 imagegpt openai-gpt",
    "GPT-NeoX": "gpt_neox gpt_neox_japanese",
    "BLOOM": "bloom",
    "Llama": (
        "afmoe apertus arcee aria aria_text audioflamingo3 bitnet blt canary cohere cohere2 "
        "cohere2_moe cohere2_vision cohere_asr cosmos3_edge cosmos3_edge_text cosmos3_omni csm "
        "cwm d_fine deepseek_vl deepseek_vl_hybrid deimv2 diffllama doge dots3_note "
        "edgetam_video emu3 ernie4_5 ernie4_5_moe ernie4_5_vl_moe esmc eurobert exaone4 "
        "exaone4_5 exaone_moe falcon_h1 flex_olmo flint fun_asr_nano fun_asr_nano_encoder gemma "
        "glm glm4 glm46v glm4_moe glm4v glm4v_moe glm4v_moe_text glm4v_text glm_image "
        "glm_image_text glm_ocr glm_ocr_text glmasr glmasr_encoder glmga got_ocr2 gpt_oss "
        "gradium_phonon_tts granite granite_docling granite_docling_text granite_speech "
        "granite_speech5_ctc granite_speech5_encoder granite_speech_plus granite_swa granitemoe "
        "granitemoe_swa granitemoeshared gte helium higgs_audio_v2 hrm_text hunyuan_vl_vision "
        "hy_v3 hyperclovax hyperclovax_vision_v2 idefics idefics2 idefics3 inkling2 "
        "inkling2_text inkling_mm_model inkling_text internlm3 internvl iquestcoder jais2 jamba "
        "janus jina_embeddings_v3 kolibri1 laguna lasr_ctc lasr_encoder lfm3 lfm3_vl "
        "lighton_ocr llama llama4 llama4_text llava llava_next llava_next_video llava_onevision "
        "lw_detr maskformer mellum mimi mimi_decoder mimi_encoder mimo_v2_flash minicpm_ocr "
        "minicpmv4_6 minicpmv4_7 minimax minimax_m2 minimax_m3_vl minimax_m3_vl_text ministral3 "
        "mistral mistral3 mixtral mllama molmo2 molmo2_text moonshine moss_transcribe_diarize "
        "muse_glimmer_assistant musicflamingo nanochat nemo_speechlm nemotron3_5_asr "
        "nemotron3_5_transcribe_asr_audio nemotron3_5_transcribe_audio "
        "nemotron3_5_transcribe_word_timestamp nemotron3_diarization "
        "nemotron3_diarization_audio nemotron_asr_streaming nemotron_asr_streaming_encoder "
        "neucodec nomic_bert olmo olmo2 olmo3 olmo_hybrid olmoe openai_privacy_filter ovis2 "
        "paddleocr_vl paligemma parakeet_ctc parakeet_encoder parakeet_rnnt parakeet_tdt "
        "pe_audio pe_audio_encoder phimoe pi0 pocket_tts pocket_tts_audio_tokenizer "
        "pocket_tts_audio_tokenizer_decoder pocket_tts_audio_tokenizer_encoder pp_chart2table "
        "pp_doclayout_v3 pp_doclayout_v4 qianfan_ocr qwen2 qwen2_5_omni_thinker qwen2_5_vl "
        "qwen2_5_vl_text qwen2_audio qwen2_moe qwen2_vl qwen2_vl_text qwen3 qwen3_5 qwen3_5_moe "
        "qwen3_5_moe_text qwen3_5_text qwen3_asr qwen3_moe qwen3_next qwen3_omni_moe_thinker "
        "qwen3_vl qwen3_vl_moe qwen3_vl_moe_text qwen3_vl_text rf_detr rt_detr rt_detr_v2 sam2 "
        "sam2_video sam3 sam3_lite_text sam3_tracker sam3_tracker_video sam3_video seed_oss "
        "smollm3 smolvlm solar_open stablelm starcoder2 step3p7 timesfm ultrabert ultravbert "
        "unlimited_ocr vibevoice vibevoice_asr video_llama_3 video_llava vipllava voxtral "
        "voxtral_realtime voxtral_realtime_encoder xcodec2"
    ),
    "T5": "longt5 mt5 switch_transformers t5 udop umt5",
    "CLIP": (
        "altclip chinese_clip clip clipseg deepseek_vl deepseek_vl_hybrid git granite_docling "
        "groupvit idefics idefics2 idefics3 metaclip_2 modernvbert owlv2 owlvit paddleocr_vl "
        "sam3 sam3_video siglip siglip2 smolvlm tipsv2 ultravbert video_llama_3 xclip"
    ),
    "Whisper": (
        "audioflamingo3 audioflamingo3_encoder dots3_note moss_transcribe_diarize "
        "moss_transcribe_diarize_audio musicflamingo qwen2_5_omni_thinker qwen2_audio "
        "qwen2_audio_encoder voxtral voxtral_encoder whisper"
    ),
    "BART, OPT": (
        "aria bart bigbird_pegasus biogpt blenderbot blenderbot-small blip-2 "
        "chinese_clip_vision_model clip_text_model clip_vision_model clvp cohere2_vision "
        "cosmos3_edge cosmos3_edge_vision d_fine florence2 fsmt gemma3 granite_docling_vision "
        "groupvit idefics3_vision inkling2 inkling2_vision instructblip instructblipvideo "
        "kosmos-2 kosmos-2.5 led lfm2 lfm2_vl lfm3_vl lfm3_vl_vision llava llava_next "
        "llava_next_video llava_onevision m2m_100 marian mask2former maskformer mbart "
        "minicpm_ocr minicpm_ocr_vision minicpmv4_6 minicpmv4_7 minicpmv4_7_vision "
        "minimax_m3_vl mlcd mlcd_vision_model mvp nllb-moe opt paligemma patchtst pegasus "
        "pegasus_x phi4_multimodal pi0 plbart pp_doclayout_v3 pp_doclayout_v4 pp_formulanet "
        "qwen3_asr qwen3_asr_encoder qwen3_omni_moe_thinker rt_detr rt_detr_v2 sam "
        "sam3_lite_text sam3_lite_text_text_model sam_hq seamless_m4t seamless_m4t_v2 "
        "shieldgemma2 siglip2_vision_model siglip_vision_model smolvlm_vision speech_to_text "
        "speecht5 step3p7 t5gemma2 tipsv2_text_model trocr unlimited_ocr video_llama_3_vision "
        "video_llava vipllava xclip xglm"
    ),
    "nn.Transformer": "oneformer rf_detr",
}
