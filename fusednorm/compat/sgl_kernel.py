"""SGLang's ``sgl_kernel``. Its norms on NVIDIA GPUs are FlashInfer's, with the same signatures."""

from fusednorm.compat.flashinfer import fused_add_rmsnorm, gemma_fused_add_rmsnorm, gemma_rmsnorm, rmsnorm

__all__ = ["fused_add_rmsnorm", "gemma_fused_add_rmsnorm", "gemma_rmsnorm", "rmsnorm"]
