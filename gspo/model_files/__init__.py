"""A model's folder: its safetensors files, and a model whose weights are read from them range by range.

Import from the module that defines a name; this door stays free of torch.

    configuration   ``read_config``, ``require_unquantised``
    folder          ``ModelFolder``, ``ModelFilesError``
    sources         ``sources_of``
    loading         ``load_from_files``, ``load_config``, ``WeightPlaces``, ``WHOLE_MODEL``
"""
