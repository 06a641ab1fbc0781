"""Names that other tools use for settings and fields of a line, and what hyimg has instead."""

import re

# By a setting or a field: its names elsewhere, in lower case, with words joined by _.
_NAMES = {
    "guidance_scale": "cfg cfg_scale cfgscale true_cfg_scale true_cfg guidance guidance_weight",
    "size": "aspect_ratio aspectratio aspect ratio resolution dimensions",
    "images": "init_image init_img input_image input_images source_image reference_image "
    "reference_images image_url image_urls input inputs source source_images source_file src "
    "file_name filename file_path image_file image_filename img img_path picture photo "
    "control_path conditioning_image reference ref_image ref_images",
    "negative_prompt": "negative neg neg_prompt uc negative_text",
    "n": "num_images num_images_per_prompt images_per_prompt batch_count batch_size num_samples "
    "samples n_samples num_outputs variations",
    "prompt": "text caption instruction edit_instruction edit_prompt positive_prompt description "
    "prompts query user_prompt",
    "custom_id": "image_id sample_id uid output_name output_image output_file output_filename "
    "output_path save_name save_as out output outfile out_path",
    "num_inference_steps": "num_steps sampling_steps inference_steps sample_steps denoise_steps "
    "ddim_steps",
    "lora": "loras lora_path lora_weights lora_name lora_file lora_dir lora_scale adapter",
    "flow_shift": "shift mu time_shift timestep_shift",
    "device": "gpu gpu_id cuda cuda_device device_id",
    "job_timeout": "timeout timeout_s max_seconds",
    "fps": "frame_rate framerate frames_per_second",
    "num_frames": "video_length length frame_count duration seconds",
    "seed": "random_seed rng_seed generator noise_seed",
    "bot_task": "think thinking no_think use_think reasoning",
    "max_new_tokens": "max_tokens max_length",
    "attention_backend": "attention attn attn_implementation flash_attn flash_attention sdpa "
    "xformers",
    "region": "mask masks mask_image mask_path mask_url mask_file inpaint inpaint_mask image_mask",
    "strength": "denoising_strength denoise_strength denoise image_strength img_strength "
    "init_strength init_image_strength prompt_strength",
}
_FIELD_OF = {other: name for name, others in _NAMES.items() for other in others.split()}
# What hyimg does not have: the meaning, its names elsewhere, and a hint.
_LACKING = (
    (
        "upscaling",
        "upscale upscaler upscaling upscale_by upscale_factor upscale_ratio enable_hr hires_fix "
        "hr_scale hr_upscaler super_resolution scale_by",
        "size selects one of the model's sizes; enlarge the file afterwards",
    ),
    (
        "ControlNet or IP-Adapter",
        "controlnet control_net control_image control_type controlnet_model ip_adapter "
        "ip_adapter_image t2i_adapter",
        "give several source pictures to an editor, and say in the prompt what each one is for",
    ),
    (
        "training, so no target pictures",
        "target target_image edited_image ground_truth",
        "leave it out; fields of a line that begin with x_ are copied to its result",
    ),
    (
        "choice of a sampler",
        "sampler sampler_name sampling_method sample_solver solver sigma_schedule eta",
        "the checkpoint decides it; for videos, scheduler chooses one",
    ),
    ("refiner", "refiner refiner_model refine", "edit the results in a second run"),
    ("clip skip", "clip_skip clipskip", "leave it out; the models read the whole text"),
    (
        "safety checker",
        "safety_checker nsfw nsfw_filter safe_mode",
        "leave it out, and check results with hyimg score",
    ),
    (
        "visible watermark",
        "watermark add_watermark",
        "leave it out; hyimg info shows how a file was made",
    ),
    (
        "code from checkpoints",
        "trust_remote_code remote_code custom_pipeline",
        "leave it out; code in a checkpoint is never executed",
    ),
    (
        "textual inversion",
        "embedding embeddings textual_inversion hypernetwork",
        "use a LoRA: lora",
    ),
)
_NOT_SUPPORTED = {
    name: (meaning, hint) for meaning, names, hint in _LACKING for name in names.split()
}


def plain(name: str) -> str:
    """Return a name as the tables here write it."""
    return re.sub(r"[\s-]", "_", name.strip("-").lower())


def spellings(name: str) -> tuple[str, str]:
    """Return a name as the tables here write it, and without a word such as `use`."""
    word = plain(name)
    return word, re.sub(r"^(no|use|enable|disable|with|set)_", "", word)


def field_of(name: str) -> str | None:
    """Return the setting or field that other tools call `name`."""
    return _FIELD_OF.get(plain(name))


def lacking(name: str) -> tuple[str, str] | None:
    """Return the meaning of a setting that hyimg does not have, and a hint; None for others."""
    return next((_NOT_SUPPORTED[one] for one in spellings(name) if one in _NOT_SUPPORTED), None)
