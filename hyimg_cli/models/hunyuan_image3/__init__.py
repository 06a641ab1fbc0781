"""HunyuanImage-3.0: one MoE network that writes a recaption and denoises its picture."""
