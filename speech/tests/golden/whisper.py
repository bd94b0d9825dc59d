"""Writes whisper.npz: features and encoder rows of a made-up recording, by faster-whisper 1.2.1 and CTranslate2 4.8.5.

pip install ctranslate2 && pip install --no-deps faster-whisper
python tests/golden/whisper.py FOLDER    # with model.bin of Whisper tiny.en
"""

import importlib.util
import sys
from pathlib import Path

import ctranslate2
import numpy as np
from tones import recordings

folder = importlib.util.find_spec("faster_whisper").submodule_search_locations[0]  # it imports more than is needed
spec = importlib.util.spec_from_file_location("feature_extractor", Path(folder) / "feature_extractor.py")
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
features = module.FeatureExtractor()(recordings()[2], padding=8000).astype(np.float32)
model = ctranslate2.models.Whisper(sys.argv[1], compute_type="float32")
rows = np.array(model.encode(ctranslate2.StorageView.from_array(features[None]), to_cpu=True))[0]
np.savez_compressed(Path(__file__).parent / "whisper.npz", features=features.T[::7], rows=rows[::5])
