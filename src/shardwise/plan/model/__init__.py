"""What one micro-batch of a model does, in program order: a `Tape`, traced or by formula.

Reading order: ``tape``; by formula ``shapes``, ``activations``, ``execution``, ``shape_costs``,
``shape_tape``, ``presets``, ``shaped``; traced ``tracking`` (live bytes and costs), ``visits``
(when the engine would be called), ``head``, ``tracing``, ``depth`` (few layers for many),
``decoder``, ``config_keys``, ``models`` (where modules come from), ``traced``.
"""
