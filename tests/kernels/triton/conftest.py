"""Kernels run in Triton's interpreter where there is no GPU. Imported before the kernels: they are made by mode."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
