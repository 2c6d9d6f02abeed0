"""This library inside serving engines, one package an engine. None is imported before it is used."""
