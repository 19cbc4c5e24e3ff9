"""Kernels run in Triton's interpreter where there is no GPU. Imported before the kernels, which are compiled by mode."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
