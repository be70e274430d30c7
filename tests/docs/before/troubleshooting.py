import os
import pickle

import torch

import fastserial
