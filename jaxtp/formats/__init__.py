"""Number formats: bytes to numbers and back, the same words from NumPy and JAX."""

from jaxtp.formats.activations import quantize_e4m3 as quantize_e4m3
from jaxtp.formats.activations import quantize_int8 as quantize_int8
from jaxtp.formats.bf16 import round_to_bf16 as round_to_bf16
from jaxtp.formats.bf16 import split_f32 as split_f32
from jaxtp.formats.division import rounded_divide as rounded_divide
from jaxtp.formats.e4m3 import E4M3_MAX as E4M3_MAX
from jaxtp.formats.e4m3 import decode_e4m3 as decode_e4m3
from jaxtp.formats.e4m3 import encode_e4m3 as encode_e4m3
from jaxtp.formats.e8m0 import decode_e8m0 as decode_e8m0
from jaxtp.formats.fp8_block import dequantize_fp8_block as dequantize_fp8_block
from jaxtp.formats.fp8_block import quantize_fp8_block as quantize_fp8_block
from jaxtp.formats.kv_blocks import KV_BLOCK as KV_BLOCK
from jaxtp.formats.kv_blocks import Q5_1_BYTES as Q5_1_BYTES
from jaxtp.formats.kv_blocks import Q8_0_BYTES as Q8_0_BYTES
from jaxtp.formats.kv_blocks import dequantize_q5_1 as dequantize_q5_1
from jaxtp.formats.kv_blocks import dequantize_q8_0 as dequantize_q8_0
from jaxtp.formats.kv_blocks import quantize_q5_1 as quantize_q5_1
from jaxtp.formats.kv_blocks import quantize_q8_0 as quantize_q8_0
from jaxtp.formats.nvfp4 import NVFP4_GROUP as NVFP4_GROUP
from jaxtp.formats.nvfp4 import decode_e2m1 as decode_e2m1
from jaxtp.formats.nvfp4 import dequantize_nvfp4 as dequantize_nvfp4
from jaxtp.formats.nvfp4 import nvfp4_to_bf16 as nvfp4_to_bf16
from jaxtp.formats.nvfp4 import quantize_nvfp4 as quantize_nvfp4
from jaxtp.formats.nvfp4 import unpack_nvfp4 as unpack_nvfp4
from jaxtp.formats.nvfp4 import unpack_nvfp4_doubled as unpack_nvfp4_doubled
