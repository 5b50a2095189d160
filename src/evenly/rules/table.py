"""The table: aten operation -> how it acts on shards. Adding an operation is one line.

Operations that PyTorch itself tags as pointwise need none. In-place variants follow the operation that they are
variants of.
"""

from __future__ import annotations

import torch

from evenly.rules import indexing, layers, losses, products, views
from evenly.rules.plan import Call, Op, Plan, Rule
from evenly.rules.pointwise import converted, factory, first_only, kept, looked_up, pointwise
from evenly.rules.reductions import reduction


def _padded(call: Call) -> int:
    """How many last dimensions a padding touches."""
    return max((position // 2 + 1 for position, size in enumerate(call["pad"]) if size), default=0)


_ROWS_ALONG_DIM = kept("dim")
_MATRICES = kept(trailing=2)
_IMAGES_1D, _IMAGES_2D, _IMAGES_3D = kept(trailing=1), kept(trailing=2), kept(trailing=3)

_NAMES: dict[Rule, str] = {
    # Element by element, though not tagged so.
    pointwise: """
        clone zeros_like ones_like full_like empty_like copy_ floor_divide hardswish rsub fill zero masked_fill
        softplus_backward hardtanh_backward leaky_relu_backward elu_backward hardswish_backward
        hardsigmoid_backward hardshrink_backward softshrink_backward log_sigmoid_forward log_sigmoid_backward
        _prelu_kernel _prelu_kernel_backward rrelu_with_noise_backward native_dropout_backward
        isin.Scalar_Tensor isin.Tensor_Scalar polar complex fake_quantize_per_tensor_affine_cachemask
        fake_quantize_per_tensor_affine_cachemask_backward
    """,
    converted: "_to_copy",
    factory: "new_zeros new_ones new_full new_empty",
    looked_up: "searchsorted.Tensor",
    first_only: "bucketize.Tensor isin.Tensor_Tensor",
    # Along other dimensions than that of the rows.
    _ROWS_ALONG_DIM: """
        _softmax _log_softmax _safe_softmax _softmax_backward_data _log_softmax_backward_data cumsum cumprod
        logcumsumexp cummax cummin sort topk gather scatter scatter_add scatter_reduce glu glu_backward _fft_r2c
        _fft_c2c _fft_c2r linalg_cross
    """,
    kept("dims"): "flip roll rot90",
    kept(trailing=_padded): "constant_pad_nd",
    _MATRICES: """
        tril triu linalg_cholesky_ex linalg_inv_ex linalg_lu linalg_lu_factor_ex linalg_qr _linalg_svd
        _linalg_eigh _linalg_det _linalg_slogdet _linalg_solve_ex linalg_eig linalg_lu_solve
        linalg_solve_triangular lu_unpack linalg_ldl_factor_ex linalg_ldl_solve cholesky_solve cholesky_inverse
        linalg_matrix_exp linalg_pinv linalg_householder_product ormqr triangular_solve _linalg_eigvals cholesky
        geqrf linalg_pinv.atol_rtol_tensor
    """,
    _IMAGES_1D: """
        reflection_pad1d reflection_pad1d_backward replication_pad1d replication_pad1d_backward
    """,
    _IMAGES_2D: """
        reflection_pad2d reflection_pad2d_backward replication_pad2d replication_pad2d_backward avg_pool2d
        avg_pool2d_backward max_pool2d_with_indices max_pool2d_with_indices_backward _adaptive_avg_pool2d
        _adaptive_avg_pool2d_backward adaptive_max_pool2d adaptive_max_pool2d_backward col2im
    """,
    _IMAGES_3D: """
        reflection_pad3d reflection_pad3d_backward replication_pad3d replication_pad3d_backward avg_pool3d
        avg_pool3d_backward max_pool3d_with_indices max_pool3d_with_indices_backward _adaptive_avg_pool3d
        _adaptive_avg_pool3d_backward adaptive_max_pool3d adaptive_max_pool3d_backward pixel_shuffle
        pixel_unshuffle im2col
    """,
    kept(batch_first=True, trailing=1): """
        upsample_nearest1d upsample_linear1d upsample_nearest2d upsample_bilinear2d upsample_bicubic2d
        upsample_nearest3d upsample_trilinear3d _upsample_nearest_exact1d _upsample_nearest_exact2d
        _upsample_nearest_exact3d _upsample_bilinear2d_aa _upsample_bicubic2d_aa grid_sampler_2d grid_sampler_3d
        grid_sampler_2d_backward grid_sampler_3d_backward channel_shuffle native_channel_shuffle
    """,
    # Reductions, and how they go on over the rows.
    reduction("sum"): "sum sum.dim_IntList nansum count_nonzero count_nonzero.dim_IntList",
    reduction("mean"): "mean mean.dim",
    reduction("prod"): "prod",
    reduction("amax"): "amax max",
    reduction("amin"): "amin min",
    reduction("amin", "amax"): "aminmax",
    reduction("all"): "all all.dim all.dims",
    reduction("any"): "any any.dim any.dims",
    reduction("logsumexp"): "logsumexp",
    reduction("norm"): "linalg_vector_norm norm.ScalarOpt_dim norm.ScalarOpt_dim_dtype",
    reduction(): """
        max.dim min.dim prod.dim_int argmax argmin var.correction std.correction var_mean.correction
        std_mean.correction median.dim nanmedian.dim mode kthvalue
    """,
    # Views.
    views.reshape: "view _unsafe_view _reshape_alias",
    views.conjugate: "_conj _neg_view",
    views.retyped: "view.dtype",
    views.permute: "permute",
    views.transpose: "transpose.int t",
    views.unsqueeze: "unsqueeze",
    views.squeeze: "squeeze squeeze.dim squeeze.dims",
    views.expand: "expand",
    views.repeat: "repeat",
    views.pick: "select.int slice.Tensor unfold",
    views.pieces: """
        unbind.int split.Tensor split_with_sizes unsafe_split.Tensor unsafe_split_with_sizes
    """,
    views.diagonal: "diagonal",
    views.stretched: "view_as_real view_as_complex",
    views.view_backward: "select_backward slice_backward diagonal_backward",
    views.scatter_view: "select_scatter slice_scatter",
    views.concatenate: "cat stack",
    # Indexing.
    kept("dim", whole=("index",)): "index_select",
    indexing.along_index: "index_add index_copy index_reduce index_fill",
    indexing.index: "index.Tensor _unsafe_index.Tensor",
    indexing.index_put: "index_put _index_put_impl_ index_put_ _unsafe_index_put",
    indexing.embedding: "embedding",
    indexing.embedding_backward: "embedding_dense_backward",
    # Products.
    products.matmul: "mm bmm mv dot vdot",
    products.added_matmul: "addmm baddbmm addmv",
    products.outer: "addr",
    products.linear: "linear",
    products.distances: "_cdist_forward",
    products.distances_backward: "_cdist_backward",
    # Layers with weights.
    layers.normalisation: """
        native_layer_norm native_layer_norm_backward _fused_rms_norm _fused_rms_norm_backward
    """,
    layers.attention: """
        _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward
    """,
    layers.resized_backward: """
        upsample_nearest1d_backward upsample_linear1d_backward upsample_nearest2d_backward
        upsample_bilinear2d_backward upsample_bicubic2d_backward upsample_nearest3d_backward
        upsample_trilinear3d_backward _upsample_nearest_exact1d_backward _upsample_nearest_exact2d_backward
        _upsample_nearest_exact3d_backward _upsample_bilinear2d_aa_backward _upsample_bicubic2d_aa_backward
    """,
    layers.group_norm: "native_group_norm",
    layers.group_norm_backward: "native_group_norm_backward",
    layers.convolution: "convolution",
    layers.convolution_backward: "convolution_backward",
    # Losses.
    losses.loss: """
        mse_loss smooth_l1_loss huber_loss soft_margin_loss binary_cross_entropy
        binary_cross_entropy_with_logits
    """,
    losses.loss_backward: """
        mse_loss_backward smooth_l1_loss_backward huber_loss_backward soft_margin_loss_backward
        binary_cross_entropy_backward
    """,
    losses.nll: "nll_loss_forward nll_loss2d_forward",
    losses.nll_backward: "nll_loss_backward nll_loss2d_backward",
    losses.margin: "multi_margin_loss multilabel_margin_loss_forward",
    losses.margin_backward: "multi_margin_loss_backward multilabel_margin_loss_backward",
}


TABLE: dict[str, Rule] = {name: rule for rule, names in _NAMES.items() for name in names.split()}
"""Rules by the name of the operation, or by name and overload where overloads differ."""


def rule_of(function: Op) -> Rule | None:
    """The rule for an operation; None where it has to be done on gathered operands."""
    schema = function._schema
    if not schema.name.startswith("aten::") or torch.Tag.inplace_view in function.tags:
        return None
    if any(argument.is_out for argument in schema.arguments):
        return None
    name = schema.name.removeprefix("aten::")
    for known in (name, name.removesuffix("_")):
        rule = TABLE.get(f"{known}.{schema.overload_name}") or TABLE.get(known)
        if rule is not None:
            return rule
    tags = function.tags
    if torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags:
        return pointwise
    return None


def plan(call: Call) -> Plan | None:
    """How the replicas carry out ``call``; None: it has to be done on the gathered operands."""
    rule = rule_of(call.function)
    return rule and rule(call)
