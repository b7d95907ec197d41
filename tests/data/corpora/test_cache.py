"""The cache lies where the environment says."""

from pathlib import Path

from shoal.data.corpora import cache_folder


def test_the_environment_decides():
    """`SHOAL_CACHE` wins; unset or empty, it is the home folder's cache."""
    assert cache_folder({"SHOAL_CACHE": "/somewhere"}) == Path("/somewhere")
    assert cache_folder({}) == cache_folder({"SHOAL_CACHE": ""}) == Path.home() / ".cache" / "shoal"
