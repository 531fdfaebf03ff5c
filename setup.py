"""List the packages: this directory is ``pipedraft``, and five of its folders are its parts."""

from setuptools import find_packages, setup

PARTS = ("models", "data_recipes", "inference", "eval", "train")
found = find_packages(include=[pattern for part in PARTS for pattern in (part, f"{part}.*")])
# script_name: the one file here that is not part of the package, so it stays out of the wheel.
setup(script_name="setup.py", packages=["pipedraft", *(f"pipedraft.{name}" for name in found)])
