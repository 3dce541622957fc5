"""Any transformers decoder with full attention over vToken's paged pool.

geometry    what a model's attention looks like, and which models are refused
cache       transformers' Cache over the pool: KV goes into slots
attention   the function that transformers calls in every layer
plan        a step's index tensors, made once for all layers
segments    attention of parts of a packed batch: decode rows together, chunks one by one
mass        attention mass by position, and the choice of victims from it, on the device
sampling    the next tokens
runner      all of it behind ``vtoken.serving.protocol.ModelRunner``
"""
