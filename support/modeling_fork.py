"""Opens a fork of train_gpt2.py in transformers and lm-eval, with trust_remote_code=True.

A fork's checkpoint has a copy of this file, which imports a copy of the fork's script. The flag
trust_remote_code=True runs both copies as they are in the folder, so give it only for a folder of
your own, or after reading them. The script imports from the clone, which PYTHONPATH must name.

No keys and values are cached. generate() computes the whole text again for each token."""

import inspect
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from huggingface_hub import snapshot_download
from torch import Tensor
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from .train_gpt2 import GPT

# Arguments of from_pretrained() that say where files are, and those that do not change a fork.
PLACE = {"revision", "token", "cache_dir", "local_files_only", "force_download"}
NO_EFFECT = {"trust_remote_code", "low_cpu_mem_usage", "use_safetensors", "use_cache"}
NO_EFFECT |= {"_from_auto", "_from_pipeline", "_commit_hash"}
ENTERED = {"dtype", "_name_or_path", "_commit_hash"}  # by transformers, in a config that it reads
# What generate() gives to forward(), which refuses the last three. The rest is for a cache.
INPUTS = ("attention_mask", "logits_to_keep", "position_ids")
INPUTS += ("output_attentions", "output_hidden_states")


class ForkConfig(PretrainedConfig):
    model_type = "gpt2-repro-fork"
    attribute_map = {  # noqa: RUF012
        "max_position_embeddings": "n_positions",
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
    }


class ForkForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = ForkConfig

    def __init__(self, config: ForkConfig, gpt: GPT):
        super().__init__(config)
        self.post_init()  # before gpt is there, whose weights it would draw at random
        self.gpt = gpt

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path,
        config: ForkConfig | None = None,
        dtype: torch.dtype | str | None = None,
        device_map: Any = None,
        **kwargs: Any,
    ) -> "ForkForCausalLM":
        """The model in a folder or on the Hub. Raises ValueError for what it cannot do."""
        place = {key: kwargs.pop(key) for key in PLACE & kwargs.keys()}
        if not Path(name).exists():
            name = snapshot_download(name, allow_patterns=["*.json", "*.safetensors"], **place)
        # With peft, transformers always gives this argument, but a path in it only for an adapter.
        adapter = kwargs.pop("adapter_kwargs", None) or {}
        kwargs["adapter"] = adapter.get("_adapter_model_path")
        refused = {k for k, v in kwargs.items() if v not in (None, False, "")} - NO_EFFECT
        # transformers has entered some arguments in the config, which then differs from the file.
        saved = cls.config_class.from_pretrained(name)
        config = config or saved
        refused |= {k for k, v in vars(config).items() if v != vars(saved).get(k)} - ENTERED
        if refused:
            raise ValueError(f"a fork of train_gpt2.py cannot be loaded with {sorted(refused)}")
        devices = set(device_map.values()) if isinstance(device_map, dict) else {device_map}
        if len(devices) > 1 or devices & {"balanced", "balanced_low_0", "sequential"}:
            raise ValueError(f"device_map={device_map}: a fork must be on one device")
        device = devices.pop()
        if device == "auto":
            device = torch.accelerator.current_accelerator(check_available=True)
        dtype = config.dtype if dtype in (None, "auto") else dtype
        config.dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        gpt = GPT.from_pretrained(name)  # refuses weights that were trained by other code
        return cls(config, gpt.to(device, config.dtype)).eval()

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("model.gpt.save_pretrained(FOLDER) saves a fork of train_gpt2.py")

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        use_cache: bool | None = None,
        return_dict: bool | None = None,
    ) -> CausalLMOutput | tuple:
        """Tokens (B, T) -> logits (B, T, V), and with labels (B, T) the loss, as in transformers.

        A row of the mask (B, T) may have zeros before and after its ones, but none between them."""
        B, T = input_ids.shape
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        if mask.shape != (B, T):
            raise ValueError(f"attention_mask is {tuple(mask.shape)}, but must be {(B, T)}")
        # Each row is rotated until its first token is at position 0. Its padding is then at the
        # end, where no token sees it. The logits are taken from where the tokens have gone.
        start = mask.bool().int().argmax(dim=1, keepdim=True)  # (B, 1)
        places = torch.arange(T, device=input_ids.device)
        rotated = (places + start) % T  # (B, T)
        if mask.bool().gather(1, rotated).int().diff(dim=1).gt(0).any():
            raise ValueError("attention_mask has zeros between ones")
        idx = input_ids.gather(1, rotated)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        at = torch.arange(B, device=idx.device)[:, None], ((places - start) % T)[:, kept]
        can_select = "at" in inspect.signature(self.gpt.forward).parameters
        logits = self.gpt(idx, at=at) if can_select else self.gpt(idx)[at]
        loss = None
        if labels is not None:
            targets = labels[:, 1:].flatten().to(logits.device)
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), targets)
        output = CausalLMOutput(loss=loss, logits=logits)
        return output.to_tuple() if return_dict is False else output

    def prepare_inputs_for_generation(self, input_ids: Tensor, **kwargs: Any) -> dict[str, Any]:
        given = {key: kwargs[key] for key in INPUTS if kwargs.get(key) is not None}
        return {"input_ids": input_ids, **given}
