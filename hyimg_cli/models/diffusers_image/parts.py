"""Parts of the library's pipelines: their classes, and what must fit between them; no torch."""

from collections.abc import Set

from hyimg_cli.models.diffusers_video.fitting import TEXT_WIDTH, Rule

SHARED: dict[str, Set[str]] = {
    "tokenizer": {"Qwen2Tokenizer", "Qwen2TokenizerFast"},
    "scheduler": {"FlowMatchEulerDiscreteScheduler"},
}
QWEN: dict[str, Set[str]] = SHARED | {
    "transformer": {"QwenImageTransformer2DModel"},
    "vae": {"AutoencoderKLQwenImage"},
    "text_encoder": {"Qwen2_5_VLForConditionalGeneration"},
}
QWEN_EDIT: dict[str, Set[str]] = QWEN | {"processor": {"Qwen2VLProcessor"}}
QWEN21: dict[str, Set[str]] = {
    "scheduler": SHARED["scheduler"],
    "transformer": {"QwenImage21Transformer2DModel"},
    "vae": {"AutoencoderKLQwenImage21"},
    "text_encoder": {"Qwen3VLForConditionalGeneration"},
    "processor": {"Qwen3VLProcessor"},
}
KLEIN: dict[str, Set[str]] = SHARED | {
    "transformer": {"Flux2Transformer2DModel"},
    "vae": {"AutoencoderKLFlux2"},
    "text_encoder": {"Qwen3ForCausalLM"},
}
FLUX2: dict[str, Set[str]] = KLEIN | {
    "tokenizer": {"PixtralProcessor"},
    "text_encoder": {"Mistral3ForConditionalGeneration"},
}
FLUX3: dict[str, Set[str]] = {
    "transformer": {"Flux3Transformer2DModel"},
    "vae": {"AutoencoderKLFlux2"},
    "text_encoder": {"Qwen3VLForConditionalGeneration"},
    "tokenizer": {"Qwen3VLProcessor"},
}
KREA2: dict[str, Set[str]] = QWEN | {
    "transformer": {"Krea2Transformer2DModel"},
    "text_encoder": {"Qwen3VLModel"},
}
Z_IMAGE: dict[str, Set[str]] = SHARED | {
    "transformer": {"ZImageTransformer2DModel"},
    "vae": {"AutoencoderKL"},
    "text_encoder": {"Qwen3Model", "Qwen3ForCausalLM"},
}
FLUX: dict[str, Set[str]] = SHARED | {
    "transformer": {"FluxTransformer2DModel"},
    "vae": {"AutoencoderKL"},
    "text_encoder": {"CLIPTextModel"},
    "tokenizer": {"CLIPTokenizer", "CLIPTokenizerFast"},
    "text_encoder_2": {"T5EncoderModel"},
    "tokenizer_2": {"T5Tokenizer", "T5TokenizerFast"},
}
LONGCAT: dict[str, Set[str]] = QWEN | {
    "transformer": {"LongCatImageTransformer2DModel"},
    "vae": {"AutoencoderKL"},
    "text_processor": {"Qwen2VLProcessor", "Qwen2_5_VLProcessor"},
}
# What must fit between these parts: see `fitting`.
FITS_QWEN: tuple[Rule, ...] = (
    (("transformer", "joint_attention_dim"), 1, TEXT_WIDTH),
    (("transformer", "in_channels"), 4, ("vae", "z_dim")),
    (("transformer", "out_channels"), 1, ("vae", "z_dim")),
)
FITS_QWEN21: tuple[Rule, ...] = (
    (("transformer", "context_in_dim"), 1, TEXT_WIDTH),
    (("transformer", "in_channels"), 1, ("vae", "z_dim")),
    (("transformer", "out_channels"), 1, ("vae", "z_dim")),
)
FITS_FLUX2: tuple[Rule, ...] = (
    (("transformer", "joint_attention_dim"), 3, TEXT_WIDTH),
    (("transformer", "in_channels"), 4, ("vae", "latent_channels")),
)
FITS_FLUX3: tuple[Rule, ...] = (
    (("transformer", "joint_attention_dim"), 8, TEXT_WIDTH),
    (("transformer", "in_channels"), 4, ("vae", "latent_channels")),
    (("transformer", "cond_in_channels"), 4, ("vae", "latent_channels")),
)
FITS_Z_IMAGE: tuple[Rule, ...] = (
    (("transformer", "cap_feat_dim"), 1, TEXT_WIDTH),
    (("transformer", "in_channels"), 1, ("vae", "latent_channels")),
)
FITS_FLUX: tuple[Rule, ...] = (
    (("transformer", "joint_attention_dim"), 1, ("text_encoder_2", "d_model")),
    (("transformer", "pooled_projection_dim"), 1, TEXT_WIDTH),
    (("transformer", "in_channels"), 4, ("vae", "latent_channels")),
)
FITS_LONGCAT: tuple[Rule, ...] = (
    (("transformer", "joint_attention_dim"), 1, TEXT_WIDTH),
    (("transformer", "in_channels"), 4, ("vae", "latent_channels")),
)
FITS_KREA2: tuple[Rule, ...] = (
    (("transformer", "text_hidden_dim"), 1, TEXT_WIDTH),
    (("transformer", "in_channels"), 4, ("vae", "z_dim")),
)
