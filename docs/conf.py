"""Settings of Sphinx for the documentation site, which `python3 do.py docs` writes into build/site.

The pages are Markdown for GitHub, without directives. `tools/reference.py` adds the navigation and the API reference.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tools")]

REPOSITORY = "https://github.com/torchweft-ml/torchweft"
# The parts of the navigation: titles and pages. Sphinx warns of a page that is in none of them.
navigation = {
    "Guide": {
        "Which tool when": "which_tool",
        "What torchweft does not promise": "promises",
        "Recipes: TensorBoard, W&B": "recipes",
    },
    "Across devices": {
        "Pipelines": "pipeline",
        "Which models can be cut": "which_models",
        "Skip connections": "skip",
        "From one process to many machines": "processes",
        "Trainer, accelerate and LoRA over ranks": "hugging_face_ranks",
    },
    "Across time": {
        "Recurrent networks": "recurrent",
        "Layers": "recurrent_layers",
        "Known cells": "recurrent_cells",
        "The engine": "recurrent_engine",
    },
    "Across machines": {
        "Experts": "experts",
        "On several machines": "experts_etcd",
        "Security": "security",
    },
    "Tutorials": {
        "A Hugging Face model in two stages": "tutorials/hugging_face",
        "LoRA over stages": "tutorials/lora",
        "7 billion parameters on two GPUs": "tutorials/two_gpus",
        "Replicas of a pipeline": "tutorials/replicas",
        "Your own U-Net": "tutorials/unet",
        "A cell of your own": "tutorials/own_cell",
        "An expert trained from three machines": "tutorials/remote_expert",
        "Where does the time go": "tutorials/where_time_goes",
    },
    "Coming from": {
        "torchgpipe": "torchgpipe",
        "torch.distributed.pipelining": "torch_pipelining",
        "Lightning": "from_lightning",
        "DeepSpeed's pipeline": "from_deepspeed",
        "fairscale, pipeline.sync": "from_fairscale",
        "hivemind": "from_hivemind",
        "nn.LSTM, PackedSequence": "from_nn_lstm",
        "Caffe2": "from_caffe2",
    },
    "About": {
        "API reference": "reference/index",
        "How torchweft is built": "architecture",
        "Glossary": "glossary",
        "Benchmarks": f"{REPOSITORY}/blob/main/benchmarks/README.md",
        "Contributing": f"{REPOSITORY}/blob/main/CONTRIBUTING.md",
        "Changes": f"{REPOSITORY}/blob/main/CHANGELOG.md",
    },
}

project = "torchweft"
author = "the torchweft authors"
copyright = "the torchweft authors, BSD-3-Clause"
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "reference",
]
myst_heading_anchors = 4  # the anchors of GitHub

autodoc_default_options = {"members": True, "member-order": "bysource", "show-inheritance": True}
autodoc_preserve_defaults = True
autosummary_generate = False
default_role = "py:obj"
napoleon_numpy_docstring = False
maximum_signature_line_length = 120
python_use_unqualified_type_names = True
toc_object_entries_show_parents = "hide"

_NAMES = {f"color-api-{part}": "var(--color-brand-content)" for part in ("name", "pre-name")}
html_theme = "furo"
html_title = project
html_baseurl = "https://torchweft-ml.github.io/torchweft/"
html_static_path = html_css_files = ["site.css"]
html_extra_path = sorted(str(path) for path in Path(__file__).parent.glob("*.svg"))
html_copy_source = False
html_theme_options = {
    "source_repository": REPOSITORY,
    "source_branch": "main",
    "source_directory": "docs/",
    "light_css_variables": {"color-brand-primary": "#37474f", "color-brand-content": "#3949ab"} | _NAMES,
    "dark_css_variables": {"color-brand-primary": "#b0bec5", "color-brand-content": "#9fa8da"} | _NAMES,
}
copybutton_exclude = ".linenos, .gp, .go"  # prompts and output
