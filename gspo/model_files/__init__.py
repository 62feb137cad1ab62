"""A model's folder: its safetensors files, and a model whose weights are read from them range by range.

Import from the module that defines a name; this door stays free of torch.

    configuration   ``read_config``, ``require_unquantised``
    text_model      ``text_model_of``: what is trained of a checkpoint that also takes images
    file_names      ``load_config``, ``file_tensors``: its weights under the names of files
    other_towers    ``read_others``: what is beside the text model
    folder          ``ModelFolder``, ``ModelFilesError``
    sources         ``sources_of``
    loading         ``load_from_files``, ``load_converted``, ``WeightPlaces``, ``WHOLE_MODEL``
"""
