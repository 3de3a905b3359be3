"""Causal language models of transformers with random weights, small enough for tests."""

import torch

SMALL = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def small_model(config_class, dtype=torch.bfloat16, **arguments):
    """A model of a configuration class, with the arguments beside these; its norms are not all ones."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**SMALL | arguments)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.1 * torch.randn_like(parameter)
    return model
