"""Embeddings of images and texts over HTTP (`encoder-cg serve`), on Ray clusters, and in NVIDIA Dynamo.

`settings`       settings of encoders and of the service
`encoder`        images and texts to a tower's inputs, batches on its device, embeddings; on an `EncodeQueue`
`protocol`       requests as OpenAI's clients, Jina's and forms have them, and answers
`application`    the Starlette application, which `server` runs in this process and `ray_serve` on Ray
`ray`, `dynamo`  files and tables on Ray clusters; Dynamo's custom vision encoder
"""
