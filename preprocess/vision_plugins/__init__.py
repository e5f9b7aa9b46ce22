"""Vision plug-ins: they make embeddings of pictures for text models that have no vision half.

The interface is that of text-generation-webui's multimodal extension. The package knows nothing of the stages."""
