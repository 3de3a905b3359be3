"""What a worker of vLLM does, in this process."""


def register():
    """Loads the plug-in, and then the platform's kernels."""
    from vllm.platforms import current_platform

    import fusednorm.vllm

    fusednorm.vllm.register()
    current_platform.import_ir_kernels()
