"""What can be imported, under which name and from which submodule."""

from __future__ import annotations

import importlib
import subprocess
import sys
from typing import Any

import pytest

from contract.errors import refused

NAMES = [
    *("LLMClusterInfo", "LLMStatusCode", "LLMException", "LLMRole", "LlmConfig", "LLMConfig"),
    *("DataType", "Status", "CacheDesc", "CacheKey", "CacheKeyByIdAndIndex", "KvCache", "Cache"),
    *("BlocksCacheKey", "LLMDataDist", "Placement", "RegisterMemStatus", "LayerSynchronizer"),
    *("TransferConfig", "CacheTask", "TransferWithCacheKeyConfig", "Memtype", "MemInfo"),
    *("TensorDesc", "Tensor", "KvCacheManager"),
]

# What programs import from the submodules.
SUBMODULES = {
    "configs": "LLMClusterInfo LLMConfig LLMRole LlmConfig",
    "data_type": (
        "DataType dtype_to_np_dtype get_python_dtype_from_wrapper_dtype np_dtype_to_dtype "
        "python_dtype_2_dwrapper_dtype valid_np_dtypes"
    ),
    "status": "LLMException LLMStatusCode Status",
    "utils.log": "debug error info warning",
    "utils.utils": (
        "check_int32 check_int64 check_isinstance check_uint16 check_uint32 check_uint64"
    ),
    "v2.cache_manager": "CacheManager",
    "v2.config": "LLMConfig LlmConfig",
    "v2.llm_datadist": "LLMDataDist",
    "v2.llm_types": (
        "BlocksCacheKey Cache CacheDesc CacheKey CacheKeyByIdAndIndex CacheTask DataType KvCache "
        "LayerSynchronizer MemInfo Memtype Placement RegisterMemStatus TransferConfig "
        "TransferWithCacheKeyConfig"
    ),
    "v2.llm_utils": "CacheTask LayerSynchronizer TransferConfig TransferWithCacheKeyConfig",
}


class TestPackage:
    def test_c01_all_names_in_the_vendors_order(self, api: Any) -> None:
        assert api.__all__ == NAMES

    @pytest.mark.parametrize("name", NAMES)
    def test_c01_name_imports(self, api: Any, name: str) -> None:
        assert getattr(api, name).__name__ in (name, "LLMConfig")

    def test_c01_star_import(self, engine: str) -> None:
        scope: dict[str, object] = {}
        exec(f"from {engine} import *", scope)
        assert set(NAMES) <= scope.keys()

    def test_c01_both_spellings_of_the_config_are_one_class(self, api: Any) -> None:
        assert api.LLMConfig is api.LlmConfig

    def test_c02_unknown_attribute_names_module_and_attribute(self, api: Any, engine: str) -> None:
        with pytest.raises(AttributeError, match=f"{engine}.*NoSuchThing"):
            _ = api.NoSuchThing

    def test_import_needs_no_tensor_library(self, engine: str) -> None:
        code = (
            f"import sys, {engine}; print(sorted({{'torch', 'numpy', 'vllm'}} & set(sys.modules)))"
        )
        seen = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
        assert seen.stdout.strip() == b"[]"


class TestSubmodules:
    @pytest.mark.parametrize("module", sorted(SUBMODULES))
    def test_names(self, api: Any, engine: str, module: str) -> None:
        loaded = importlib.import_module(f"{engine}.{module}")
        for name in SUBMODULES[module].split():
            found = getattr(loaded, name)
            if name in NAMES:
                assert found is getattr(api, name)

    @pytest.mark.parametrize("module", ["v2.llm_types", "v2.llm_utils", "data_type"])
    def test_unknown_attribute(self, engine: str, module: str) -> None:
        with pytest.raises(AttributeError, match=f"{module}.*NoSuchThing"):
            _ = importlib.import_module(f"{engine}.{module}").NoSuchThing

    def test_pull_key_names_a_request_or_a_prefix(self, api: Any, engine: str) -> None:
        manager = importlib.import_module(f"{engine}.v2.cache_manager").CacheManager
        for req_id, prefix_id in [(2**64 - 1, 2**64 - 1), (5, 6)]:
            with refused(api):
                manager.check_cache_key(api.CacheKey(1, req_id, 0, prefix_id))
        manager.check_cache_key(api.CacheKey(1, 5))


class TestDataTypes:
    def test_numbers(self, api: Any, engine: str) -> None:
        tables = importlib.import_module(f"{engine}.data_type")
        assert tables.python_dtype_2_dwrapper_dtype[api.DataType.DT_BF16] == 27
        assert tables.get_python_dtype_from_wrapper_dtype(13) is api.DataType.DT_STRING
        with pytest.raises(ValueError):
            tables.get_python_dtype_from_wrapper_dtype(5)

    def test_numpy_tables(self, api: Any, engine: str) -> None:
        numpy = pytest.importorskip("numpy")
        tables = importlib.import_module(f"{engine}.data_type")
        assert tables.dtype_to_np_dtype[api.DataType.DT_BF16] is numpy.float16
        assert tables.dtype_to_np_dtype[api.DataType.DT_STRING] is numpy.bytes_
        assert tables.np_dtype_to_dtype[numpy.float16] is api.DataType.DT_FLOAT16
        assert api.DataType.DT_BF16 not in tables.np_dtype_to_dtype.values()
        assert numpy.float64 in tables.valid_np_dtypes
        for kind, counterpart in tables.dtype_to_np_dtype.items():
            if kind is not api.DataType.DT_STRING:
                assert numpy.dtype(counterpart).itemsize == kind.num_bytes


class TestLogger:
    @staticmethod
    def output(engine: str, level: str) -> list[str]:
        code = f"""
import os
os.environ["ASCEND_GLOBAL_LOG_LEVEL"] = {level!r}
from {engine}.utils import log
log.debug("d"); log.info("i"); log.warning("w"); log.error("%s", "e")
"""
        run = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, check=True, text=True
        )
        assert run.stderr == ""
        return run.stdout.splitlines()

    def test_levels(self, engine: str) -> None:
        assert [len(self.output(engine, level)) for level in ("0", "1", "2", "3")] == [4, 3, 2, 1]
        assert len(self.output(engine, "")) == 1

    def test_record(self, engine: str) -> None:
        (line,) = self.output(engine, "3")
        assert line.startswith("[ERROR] LLM_DATADIST(")
        assert line.endswith(":e")
        assert "[<string>:" in line

    def test_variable_of_the_vendor_is_set_by_the_import(self, engine: str) -> None:
        code = f"import os, {engine}; print(os.environ['AUTO_USE_UC_MEMORY'])"
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
        assert run.stdout.split()[-1] in (b"0", b"1")
