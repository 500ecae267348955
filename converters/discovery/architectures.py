"""Table of the parts that each model type of transformers 5.23 adds around its projections.

`signs.PARTS` names the parts. The table was made from the sources and the default configuration of
every model, and checked by running the models. A type that is missing from a part is known to lack
it by default. This table is kept by hand; `model_types` is the generated table of block prefixes.
"""

from jaxmha.converters.discovery import unlike

# Parts that a conversion can leave out, and that the caller can add around the converted layer.
PARTS = {
    part: frozenset(types.split())
    for part, types in {
        "rotary": """
            HunyuanDiT2DModel litgpt LTXVideoTransformer3DModel
            StableAudioDiTModel WanTransformer3DModel timm_rotated
            EvollaModel afmoe apertus arcee aria aria_text audioflamingo3 axk1 axk2 aya_vision
            bailing_hybrid bamba beam bitnet blt blt_global_transformer blt_local_decoder
            blt_local_encoder blt_patcher canary chameleon chmv2 clvp clvp_decoder clvp_encoder
            codegen cohere cohere2 cohere2_moe cohere2_vision cohere_asr cohere_compass
            cohere_compass_text cohere_compass_vision colmodernvbert colpali colqwen2
            cosmos3_edge cosmos3_edge_text cosmos3_omni csm csm_depth_decoder_model cwm dbrx
            deepseek_ocr2 deepseek_ocr2_encoder deepseek_ocr2_text deepseek_ocr2_vision
            deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 deepseek_vl deepseek_vl_hybrid dia
            dia_decoder dia_encoder diffllama diffusion_gemma diffusion_gemma_text dinov3_vit
            doge dots1 dots3_note dots3_note_audio_encoder dots3_note_text
            dots3_note_vision_encoder edgetam_video efficientloftr embedding_gemma2
            embedding_gemma2_text emu3 emu3_text_model eomt_dinov3 ernie4_5 ernie4_5_moe
            ernie4_5_vl_moe ernie4_5_vl_moe_text ernie4_5_vl_moe_vision esm esmc esmfold2
            eurobert evolla exaone4 exaone4_5 exaone4_5_vision exaone_moe falcon falcon_h1
            fast_vlm flex_olmo flint fun_asr_nano fuyu gemma gemma2 gemma3 gemma3_text gemma3n
            gemma3n_text gemma3n_vision gemma4 gemma4_text gemma4_unified
            gemma4_unified_assistant gemma4_unified_audio gemma4_unified_text
            gemma4_unified_vision gemma4_vision glm glm4 glm46v glm4_moe glm4_moe_lite glm4v
            glm4v_moe glm4v_moe_text glm4v_moe_vision glm4v_text glm4v_vision glm5_next
            glm5_next_vision glm_image glm_image_text glm_moe_dsa glm_ocr glm_ocr_text
            glm_ocr_vision glmasr glmasr_encoder glmga got_ocr2 gpt_neox gpt_neox_japanese
            gpt_oss gptj gradium_phonon_tts granite granite4_vision granite4_vision_text
            granite_docling granite_docling_text granite_speech granite_speech_plus granite_swa
            granitemoe granitemoe_swa granitemoehybrid granitemoeshared gte helium
            higgs_audio_v2 hrm_text hunyuan_v1_dense hunyuan_v1_moe hunyuan_vl hunyuan_vl_text
            hy_v3 hy_v4 hyperclovax hyperclovax_vision_v2 idefics idefics2 idefics3
            idefics_perciever idefics_vision inkling2 inkling2_vision internlm3 internvl
            iquestcoder jais2 janus jetmoe jev jina_embeddings_v3 kimi_k25 kimi_k25_vision
            kimi_linear kolibri1 kyutai_speech_to_text laguna lasr_ctc lasr_encoder lfm2
            lfm2_moe lfm2_vl lfm3 lfm3_vl lfm3_vl_vision lightglue lighton_ocr llama llama4
            llama4_text llama4_vision_model llava llava_next llava_next_video llava_onevision
            longcat_flash mellum mimi mimi_decoder mimi_encoder mimo_v2_flash minicpm3
            minicpm_ocr minicpmv4_6 minicpmv4_7 minimax minimax_m2 minimax_m3_vl
            minimax_m3_vl_text minimax_m3_vl_vision ministral ministral3 mistral mistral3
            mistral4 mistral_large4 mistral_large4_text mixtral mlcd mlcd_vision_model mllama
            mllama_text_model modernbert modernbert-decoder modernvbert molmo2 molmo2_text
            moonshine moonshine_streaming moshi moshi_depth moss_transcribe_diarize muse_glimmer
            muse_glimmer_assistant muse_glimmer_text muse_glimmer_vision muse_spark
            muse_spark_text muse_spark_vision musicflamingo nanochat nemo_speechlm nemotron
            nemotron3_5_asr nemotron3_5_transcribe_asr_audio nemotron3_5_transcribe_audio
            nemotron3_5_transcribe_word_timestamp nemotron3_diarization
            nemotron3_diarization_audio nemotron_asr_streaming nemotron_asr_streaming_encoder
            nemotron_h nemotron_h_omni neomme neucodec nomic_bert olmo olmo2 olmo3 olmo_hybrid
            olmoe openai_privacy_filter ovis2 paddleocr_vl paddleocr_vl_text paddleocr_vl_vision
            paligemma parakeet_ctc parakeet_encoder parakeet_rnnt parakeet_tdt pe_audio
            pe_audio_encoder pe_audio_video pe_audio_video_encoder pe_video pe_video_encoder
            perception_lm persimmon phi phi3 phi4_multimodal phimoe pi0 pixtral pocket_tts
            pocket_tts_audio_tokenizer pocket_tts_audio_tokenizer_decoder
            pocket_tts_audio_tokenizer_encoder pp_chart2table qianfan_ocr qwen2 qwen2_5_omni
            qwen2_5_omni_bigvgan qwen2_5_omni_dit qwen2_5_omni_talker qwen2_5_omni_text
            qwen2_5_omni_thinker qwen2_5_omni_token2wav qwen2_5_omni_vision_encoder qwen2_5_vl
            qwen2_5_vl_text qwen2_5_vl_vision qwen2_audio qwen2_moe qwen2_vl qwen2_vl_text
            qwen2_vl_vision qwen3 qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_moe_vision
            qwen3_5_text qwen3_5_vision qwen3_asr qwen3_moe qwen3_next qwen3_omni_moe
            qwen3_omni_moe_talker_code_predictor qwen3_omni_moe_talker_text qwen3_omni_moe_text
            qwen3_omni_moe_thinker qwen3_omni_moe_vision_encoder qwen3_vl qwen3_vl_moe
            qwen3_vl_moe_text qwen3_vl_moe_vision qwen3_vl_text qwen3_vl_vision qwen4_exp
            qwen4_exp_text qwen4_exp_vision recurrent_gemma roformer sam2_video sam3
            sam3_geometry_encoder sam3_lite_text sam3_tracker sam3_tracker_video sam3_video
            sam3_vision_model sam3_vit_model sapiens2 sapiens2_head seamless_m4t seed_oss
            shieldgemma2 smollm3 smolvlm solar_open stablelm starcoder2 step3p5 step3p5_vision
            step3p7 t5_gemma_module t5gemma t5gemma2 t5gemma2_decoder t5gemma2_encoder
            t5gemma2_text timesfm2_5 ultrabert ultravbert unlimited_ocr unlimited_ocr_text
            vaultgemma vibevoice vibevoice_asr video_llama_3 video_llama_3_vision video_llava
            vipllava vjepa2 voxtral voxtral_realtime voxtral_realtime_encoder
            voxtral_realtime_text wav2vec2-bert wav2vec2-conformer xcodec2 youtu zamba2 zaya
        """,
        "alibi": """
            bloom mpt
        """,
        "relative": """
            bros canary clap clap_audio_model cohere_asr cpmant dab-detr deberta deberta-v2
            deepseek_ocr2 deepseek_ocr2_sam_vision_model deepseek_ocr2_text deepseek_ocr2_vision
            deepseek_v4 deepseek_vl_hybrid dinat donut-swin fastspeech2_conformer
            fastspeech2_conformer_with_hifigan funnel gemma3n gemma3n_audio gemma3n_text
            gemma3n_vision gemma4 gemma4_audio gemma4_text got_ocr2 got_ocr2_vision
            granite_speech granite_speech5_ctc granite_speech5_encoder granite_speech_encoder
            granite_speech_plus granite_speech_plus_encoder inkling2 inkling2_text
            inkling_mm_model inkling_text layoutlmv2 layoutlmv3 layoutxlm longt5 mask2former
            maskformer-swin mpnet mt5 musicgen musicgen_melody nemotron3_5_asr
            nemotron_asr_streaming nemotron_asr_streaming_encoder neucodec oneformer
            parakeet_ctc parakeet_encoder parakeet_rnnt parakeet_tdt phi4_multimodal
            phi4_multimodal_audio pix2struct pix2struct_text_model pix2struct_vision_model
            pop2piano pp_chart2table pp_chart2table_vision pp_doclayout_v2 pp_formulanet
            pp_formulanet_vision prophetnet sam sam3 sam3_detr_decoder sam3_lite_text
            sam3_lite_text_detr_decoder sam3_video sam_hq sam_hq_vision_model sam_vision_model
            seamless_m4t seamless_m4t_v2 seggpt sew-d slanext slanext_vision speecht5 swin
            swin2sr swinv2 switch_transformers t5 udop umt5 unlimited_ocr
            unlimited_ocr_sam_vision_model unlimited_ocr_vision vits wav2vec2-bert
            wav2vec2-conformer wavlm xcodec2 xlnet zoedepth
        """,
        "window": """
            afmoe aya_vision beam blt blt_patcher clap clap_audio_model cohere2 cohere2_moe
            cohere2_vision cohere_compass cohere_compass_text colmodernvbert csm cwm
            data2vec-vision deepseek_ocr2 deepseek_ocr2_sam_vision_model deepseek_ocr2_text
            deepseek_ocr2_vision deepseek_v4 deepseek_vl_hybrid diffusion_gemma
            diffusion_gemma_text donut-swin dots1 dots3_note dots3_note_text
            dots3_note_vision_encoder edgetam_video embedding_gemma2 embedding_gemma2_text
            esmfold2 exaone4 exaone4_5 exaone4_5_vision exaone_moe flint florence2
            florence_vision focalnet gemma2 gemma3 gemma3_text gemma3n gemma3n_audio
            gemma3n_text gemma3n_vision gemma4 gemma4_audio gemma4_text gemma4_unified
            gemma4_unified_assistant gemma4_unified_audio gemma4_unified_text
            gemma4_unified_vision got_ocr2 got_ocr2_vision gpt_neo gpt_oss granite_speech
            granite_speech5_ctc granite_speech5_encoder granite_speech_encoder
            granite_speech_plus granite_speech_plus_encoder granite_swa granitemoe_swa
            grounding-dino hiera hyperclovax_vision_v2 idefics2 inkling2 inkling2_text
            inkling_mm_model inkling_text kolibri1 kyutai_speech_to_text laguna led lfm3 lfm3_vl
            llama4 llama4_text longformer longt5 lw_detr mask2former maskformer maskformer-swin
            mellum mimi mimi_decoder mimi_encoder mimo_v2_flash minicpm_ocr_vision
            minicpmv4_6_vision minicpmv4_7_vision ministral mistral mm-grounding-dino modernbert
            modernbert-decoder modernvbert moonshine_streaming moonshine_streaming_encoder moshi
            moshi_depth muse_glimmer muse_glimmer_assistant muse_glimmer_text
            muse_glimmer_vision muse_spark muse_spark_text muse_spark_vision nemotron3_5_asr
            nemotron_asr_streaming nemotron_asr_streaming_encoder neomme olmo3 oneformer
            openai_privacy_filter paddleocr_vl paddleocr_vl_text pe_audio pe_audio_video
            pe_video pegasus_x pocket_tts_audio_tokenizer pocket_tts_audio_tokenizer_decoder
            pocket_tts_audio_tokenizer_encoder pp_chart2table pp_chart2table_vision
            pp_formulanet pp_formulanet_vision qwen2_5_omni qwen2_5_omni_bigvgan
            qwen2_5_omni_thinker qwen2_5_omni_token2wav qwen2_5_omni_vision_encoder qwen2_5_vl
            qwen2_5_vl_vision qwen3_omni_moe reformer rf_detr rf_detr_dinov2 sam sam2
            sam2_hiera_det_model sam2_video sam2_vision_model sam3 sam3_lite_text sam3_tracker
            sam3_tracker_video sam3_video sam3_vision_model sam3_vit_model sam_hq
            sam_hq_vision_model sam_vision_model shieldgemma2 slanext slanext_vision swin
            swin2sr swinv2 t5_gemma_module t5gemma t5gemma2 t5gemma2_decoder t5gemma2_encoder
            t5gemma2_text ultrabert ultravbert unlimited_ocr unlimited_ocr_sam_vision_model
            unlimited_ocr_text unlimited_ocr_vision vaultgemma vits voxtral_realtime
            voxtral_realtime_encoder voxtral_realtime_text
        """,
        "soft_cap": """
            gemma2 gemma3n gemma3n_audio gemma3n_text gemma3n_vision gemma4 gemma4_audio
            gemma4_text t5_gemma_module t5gemma vaultgemma videoprism videoprism_text_model
            videoprism_vision_model
        """,
        "scale": """
            gemma2 gemma3 gemma3_text granite granite4_vision granite4_vision_text
            granite_docling granite_docling_text granite_speech granite_speech_plus granite_swa
            granitemoe granitemoe_swa granitemoehybrid granitemoeshared hyperclovax
            hyperclovax_vision_v2 mimo_v2_flash muse_glimmer muse_glimmer_text muse_spark
            muse_spark_text shieldgemma2 step3p5 step3p7 t5_gemma_module t5gemma t5gemma2
            t5gemma2_decoder t5gemma2_encoder t5gemma2_text vaultgemma
        """,
        "qk_norm": """
            AuraFlowTransformer2DModel CogView3PlusTransformer2DModel CogVideoXTransformer3DModel HunyuanDiT2DModel
            LTXVideoTransformer3DModel WanTransformer3DModel afmoe apertus axk1 axk2 beam blt blt_local_decoder blt_local_encoder chameleon
            cosmos3_omni deepseek_v2 deepseek_v3 deepseek_v32 diffusion_gemma
            diffusion_gemma_text doge dots1 dots3_note dots3_note_text dots3_note_vision_encoder
            embedding_gemma2 embedding_gemma2_text esmc esmfold2 exaone4 exaone4_5 exaone_moe
            flex_olmo flint fun_asr_nano fuyu gemma3 gemma3_text gemma3n gemma3n_audio
            gemma3n_text gemma3n_vision gemma4 gemma4_audio gemma4_text gemma4_unified
            gemma4_unified_audio gemma4_unified_text gemma4_unified_vision gemma4_vision
            glm4_moe_lite glm5_next glm5_next_text glm5_next_vision glm_moe_dsa glm_ocr
            glm_ocr_vision hunyuan_v1_dense hunyuan_v1_moe hunyuan_vl hunyuan_vl_text hy_v3
            hy_v4 inkling_mm_model inkling_text janus_vqgan jev kimi_k25 kimi_linear kolibri1
            laguna lfm2 lfm2_moe lfm2_vl lfm3 lfm3_vl lfm3_vl_vision lighton_ocr mellum minicpm3
            minicpm_ocr minicpmv4_6 minicpmv4_7 minimax_m2 minimax_m3_vl minimax_m3_vl_text
            mistral4 mistral_large4 mistral_large4_text molmo2 molmo2_text
            moss_transcribe_diarize muse_glimmer muse_glimmer_assistant muse_glimmer_text
            muse_spark muse_spark_text nanochat nemo_speechlm nemotron3_5_transcribe_asr_audio
            nemotron3_5_transcribe_audio nemotron3_5_transcribe_word_timestamp neomme olmo2
            olmo3 olmo_hybrid olmoe pe_audio pe_audio_encoder pe_audio_video
            pe_audio_video_encoder pe_video pe_video_encoder persimmon qwen3 qwen3_5 qwen3_5_moe
            qwen3_5_moe_text qwen3_5_text qwen3_asr qwen3_moe qwen3_next
            qwen3_omni_moe_talker_code_predictor qwen3_omni_moe_talker_text qwen3_omni_moe_text
            qwen3_omni_moe_thinker qwen3_vl qwen3_vl_moe qwen3_vl_moe_text qwen3_vl_text
            qwen4_exp qwen4_exp_text sapiens2 sapiens2_head shieldgemma2 step3p5 step3p7
            t5gemma2 t5gemma2_decoder t5gemma2_encoder t5gemma2_text timesfm2_5 videoprism youtu
            zaya
        """,
        "query_scale": """
            beam inkling2 inkling2_text inkling_mm_model inkling_text llama4 llama4_text ministral3
            mistral4
        """,
        "sinks": """
            deepseek_v4 flint gpt_oss granite_swa granitemoe_swa hy_v4 inkling2 inkling2_text
            mimo_v2_flash openai_privacy_filter
        """,
        "gate": """
            afmoe axk2 bailing_hybrid beam deepseek_v4 dots3_note dots3_note_text
            dots3_note_vision_encoder esmfold2 glm5_next glm5_next_text hrm_text hy_v4 idefics
            idefics_perciever idefics_vision inkling2 inkling2_text jev kimi_linear laguna lfm3
            lfm3_vl lighton_ocr minicpm_ocr minicpmv4_6 minicpmv4_7 minimax mistral3
            mistral_large4 mllama mllama_text_model muse_glimmer muse_glimmer_text muse_spark
            muse_spark_text neomme olmo_hybrid patchtsmixer pixtral qwen3_5 qwen3_5_moe
            qwen3_5_moe_text qwen3_5_text qwen3_next qwen4_exp qwen4_exp_text step3p5 step3p7
            zamba
        """,
        "multiplier": """

        """,
        "layers": """
            axk2 bailing_hybrid deepseek_v32 deepseek_v4 dots3_note dots3_note_text glm5_next
            glm5_next_text glm_moe_dsa granitemoehybrid hy_v4 jev kimi_linear minicpm_ocr
            minicpmv4_6 minicpmv4_7 minimax mistral_large4 mistral_large4_text olmo_hybrid
            qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_next qwen4_exp
            qwen4_exp_text
        """,
        "mask": """
            git grounding-dino mm-grounding-dino
        """,
        "heads": """
            bridgetower bridgetower_vision_model
        """,
    }.items()
}
# Part of the attention function (its form, scale, norms of queries and keys) -> model types in which
# it differs from the function of their layout. A conversion that cannot carry the part over raises.
FUNCTIONS = {
    part: frozenset(types.split())
    for part, types in {
        "form": " ".join(["muse_spark_text", *(types for _, types in unlike.FORMS)]),
        "scale": """
            dia dia_decoder dia_encoder diffusion_gemma_text embedding_gemma2_text gemma3n_text
            gemma4_text gemma4_unified_text gpt_neo zamba zamba2
        """,
        "qk_norm": """
            llama4 llama4_text nanochat
        """,
    }.items()
}
# Model types that add nothing around their projections, or have no attention.
_PLAIN = """
    AutoencoderKL CogVideoXTransformer3DModel DiTTransformer2DModel PixArtTransformer2DModel
    PriorTransformer UNet2DConditionModel UNet2DModel VQModel
    aimv2 aimv2_text_model aimv2_vision_model albert align align_text_model align_vision_model
    altclip altclip_text_model altclip_vision_model audio-spectrogram-transformer
    audioflamingo3_encoder bark bart beit bert bert-generation biogpt bit blenderbot
    blenderbot-small blip blip-2 blip_2_qformer blip_2_vision_model blip_text_model
    blip_vision_model bridgetower_text_model camembert canary_decoder canine chameleon_vqgan
    chinese_clip chinese_clip_text_model chinese_clip_vision_model clap_text_model clip
    clip_text_model clip_vision_model clipseg clipseg_text_model clipseg_vision_model
    coarse_acoustics conditional_detr convbert convnext convnextv2 cosmos3_edge_vision ctrl cvt
    d_fine dac data2vec-audio data2vec-text decision_transformer deformable_detr deimv2 deit
    depth_anything depth_pro detr dinov2 dinov2_with_registers dinov3_convnext distilbert dpr
    dpt edgetam edgetam_mask_decoder edgetam_prompt_encoder edgetam_video_mask_decoder
    edgetam_video_prompt_encoder edgetam_vision_model efficientnet electra emu3_vqgan encodec
    encoder-decoder eomt ernie falcon_mamba fastspeech2_conformer_hifigan fine_acoustics
    flaubert flava flava_image_codebook flava_image_model flava_multimodal_model
    flava_text_model fnet fsmt fun_asr_nano_encoder gemma4_assistant git_vision_model
    glm_image_vision glm_image_vqmodel glpn gpt-sw3 gpt2 gpt_bigcode granite_docling_vision
    groupvit groupvit_text_model groupvit_vision_model hgnet_v2 higgs_audio_v2_tokenizer hubert
    hunyuan_vl_vision ibert idefics2_perceiver idefics2_vision idefics3_vision ijepa imagegpt
    inkling_audio inkling_vision instructblip instructblip_qformer instructblip_vision_model
    instructblipvideo instructblipvideo_qformer instructblipvideo_vision_model internvl_vision
    jamba janus_vision_model kosmos-2 kosmos-2.5 kosmos_2_5_text_model kosmos_2_5_vision_model
    kosmos_2_text_model kosmos_2_vision_model layoutlm levit lilt luke lw_detr_vit lxmert
    m2m_100 mamba mamba2 marian markuplm mbart megatron-bert metaclip_2 metaclip_2_text_model
    metaclip_2_vision_model mgp-str mllama_vision_model mobilebert mobilenet_v1 mobilenet_v2
    mobilevit mobilevitv2 molmo2_adapter molmo2_vision moss_transcribe_diarize_audio
    muse_spark_audio musicgen_decoder musicgen_melody_decoder mvp nllb-moe nougat omdet-turbo
    openai-gpt opt ovis2_vision owlv2 owlv2_text_model owlv2_vision_model owlvit
    owlvit_text_model owlvit_vision_model patchtst pegasus perceiver phi4_multimodal_vision
    pixio plbart poolformer pp_doclayout_v3 pp_doclayout_v4 pp_formulanet_text pp_lcnet
    pp_lcnet_v3 pp_lcnet_v4 pp_ocrv5_mobile_det pp_ocrv5_mobile_rec pp_ocrv5_server_det
    pp_ocrv5_server_rec pp_ocrv6_medium_det pp_ocrv6_small_det pp_ocrv6_small_rec
    pp_ocrv6_tiny_rec prompt_depth_anything pvt pvt_v2 qianfan_ocr_vision
    qwen2_5_omni_audio_encoder qwen2_audio_encoder qwen3_asr_encoder
    qwen3_omni_moe_audio_encoder radio rag regnet rembert resnet roberta roberta-prelayernorm
    roc_bert rt_detr rt_detr_resnet rt_detr_v2 rwkv sam2_mask_decoder sam2_prompt_encoder
    sam2_video_mask_decoder sam2_video_prompt_encoder sam3_detr_encoder
    sam3_lite_text_detr_encoder sam3_lite_text_geometry_encoder sam3_lite_text_mask_decoder
    sam3_lite_text_text_model sam3_mask_decoder sam3_tracker_mask_decoder
    sam3_tracker_prompt_encoder sam3_tracker_video_mask_decoder
    sam3_tracker_video_prompt_encoder sam_hq_mask_decoder sam_hq_prompt_encoder sam_mask_decoder
    sam_prompt_encoder segformer semantic sew siglip siglip2 siglip2_text_model
    siglip2_vision_model siglip_text_model siglip_vision_model slanet smolvlm_vision
    speech-encoder-decoder speech_to_text speecht5_hifigan splinter squeezebert superglue
    superpoint swiftformer table-transformer tapas textnet time_series_transformer timesfm
    timesformer timm_backbone timm_wrapper tipsv2 tipsv2_dpt tipsv2_text_model
    tipsv2_vision_model trocr tvp unispeech unispeech-sat univnet unlimited_ocr_vision_encoder
    upernet uvdoc uvdoc_backbone vibevoice_acoustic_tokenizer
    vibevoice_acoustic_tokenizer_decoder vibevoice_acoustic_tokenizer_encoder
    vibevoice_diffusion videomae videomt vilt vision-encoder-decoder vision-text-dual-encoder
    visual_bert vit vit_mae vit_msn vitdet vitmatte vitpose vitpose_backbone vivit
    voxtral_encoder wav2vec2 whisper xclip xclip_text_model xclip_vision_model xcodec xglm xlm
    xlm-roberta xlm-roberta-xl xlstm xmod yolos
"""
PLAIN = frozenset(_PLAIN.split())
KNOWN = PLAIN.union(*PARTS.values(), *FUNCTIONS.values())


def parts(model_type: str) -> list[str]:
    """The parts (`PARTS`) that a model type adds around its projections.

    >>> parts("bloom"), parts("bert"), "bert" in KNOWN
    (['alibi'], [], True)
    """
    return [part for part, types in PARTS.items() if model_type in types]


def functions(model_type: str) -> list[str]:
    """The parts (`FUNCTIONS`) that give a model type another attention function.

    >>> functions("dia")
    ['scale']
    """
    return [part for part, types in FUNCTIONS.items() if model_type in types]
