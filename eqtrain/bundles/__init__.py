"""Replay bundles: a step that went wrong as a folder of files, to be explained on one device."""

from .bundle import Bundle as Bundle
from .bundle import read_bundle as read_bundle
from .bundle import save_bundle as save_bundle
from .files import BundleError as BundleError
from .replay import explain_bundle as explain_bundle
