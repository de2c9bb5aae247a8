"""A guard: every private name of torch that the FSDP adapter uses, and that this torch has it."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_common as common
from torch.distributed.fsdp._fully_shard import _fsdp_param as param
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as param_group
from torch.distributed.fsdp._fully_shard import _fsdp_state as state

ADAPTERS = Path(__file__).parents[2] / "thinwire" / "adapters"

OF_GROUPS = {"fsdp_params", "mesh_info", "device", "force_sum_reduction_for_comms"}
OF_PARAMETERS = {
    "sharded_param",
    "sharded_size",
    "padded_sharded_param_size",
    "fsdp_placement",
    "mesh_info",
    "mp_policy",
    "offload_to_cpu",
    "_module_info",
    "_orig_size",
}
OF_MESHES = {"shard_mesh_rank", "replicate_process_group", "replicate_mesh_dim", "mesh"}
OF_MODULES = {"module", "param_name"}
UNDERSCORED = {
    *("_get_fsdp_state", "_fsdp_param_groups", "_fsdp_param_group", "_module_info", "_orig_size"),
    *("_post_accumulate_grad_hooks", "_current_graph_task_id", "_execution_engine", "_C"),
    *("_foreach_mul_", "_version"),
}


def assigned_in(source: object) -> set[str]:
    text = inspect.getsource(source)  # type: ignore[arg-type]
    return set(re.findall(r"self\.(\w+)\b", text)) | set(re.findall(r"^    (\w+):", text, re.M))


def test_this_torch_has_every_private_name_that_the_adapter_uses() -> None:
    assert assigned_in(param_group.FSDPParamGroup) >= OF_GROUPS
    assert assigned_in(param.FSDPParam) >= OF_PARAMETERS
    meshes = assigned_in(common.FSDPMeshInfo) | assigned_in(common.DDPMeshInfo)
    assert meshes | assigned_in(common.DataParallelMeshInfo) >= OF_MESHES
    assert assigned_in(param.ParamModuleInfo) >= OF_MODULES
    assert {"_fsdp_param_groups", "_fsdp_param_group"} & assigned_in(state.FSDPState)
    assert hasattr(FSDPModule, "_get_fsdp_state")
    assert hasattr(torch._C, "_current_graph_task_id")
    source = inspect.getsource(param_group) + inspect.getsource(
        inspect.getmodule(param_group.foreach_reduce)  # type: ignore[arg-type]
    )
    assert "_post_accumulate_grad_hooks" in source
    assert "mesh_info.replicate_process_group" in source, "what a unit asks for an all-reduce"


def test_the_adapter_uses_no_other_private_name() -> None:
    found: set[str] = set()
    for path in ADAPTERS.glob("fsdp*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                own = isinstance(node.value, ast.Name) and node.value.id == "self"
                if node.attr.startswith("_") and not node.attr.startswith("__") and not own:
                    found.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                if re.fullmatch(r"_[a-z]\w+", node.value):
                    found.add(node.value)
            elif isinstance(node, ast.ImportFrom) and node.module != "__future__":
                assert not any(part.startswith("_") for part in (node.module or "").split("."))
    assert found - {"_thinwire_hook"} <= UNDERSCORED
