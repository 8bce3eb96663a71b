import pytest
import torch
import torch.distributed as dist
from samples.models import Then, vector
from torch import nn
from torch.utils.checkpoint import checkpoint

import dome
from dome.parameters import Layout
from dome.samples import PerSample, source_for


def attach(model, **options):
    return PerSample(model, Layout(model), **options)


def test_batch_norm_in_training_mode_is_refused_by_name():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    with pytest.raises(ValueError, match=r"'1'.*GroupNorm.*eval\(\).*microbatch"):
        attach(model)


def test_batch_norm_switched_to_training_later_is_refused_by_name():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).eval()
    attach(model)
    model.train()
    with pytest.raises(RuntimeError, match=r"'1'.*microbatch"):
        model(torch.randn(4, 3))
    assert torch._C._len_torch_function_stack() == 0


def test_batch_norm_without_parameters_is_refused_by_name():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, affine=False)).eval()
    attach(model)
    model.train()
    with pytest.raises(RuntimeError, match=r"'1'.*microbatch"):
        model(torch.randn(4, 3))


def test_batch_norm_in_training_mode_still_runs_without_gradients():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).eval()
    attach(model)
    model.train()
    with torch.no_grad():
        assert model(torch.randn(4, 3)).shape == (4, 4)


def test_compiled_models_are_refused_with_a_sentence():
    with pytest.raises(ValueError, match=r"torch.compile.*microbatch"):
        attach(torch.compile(nn.Linear(3, 2), backend="eager"))
    model = nn.Sequential(nn.Linear(3, 2))
    model[0].compile(backend="eager")
    with pytest.raises(ValueError, match=r"'0' is compiled by torch.compile"):
        attach(model)


@pytest.mark.parametrize("kind", ["per_sample", "microbatch"])
def test_data_parallel_wrappers_are_refused_with_a_sentence(kind):
    model = nn.DataParallel(nn.Linear(3, 2))
    with pytest.raises(ValueError, match=r"by DataParallel.*dome.distributed.attach"):
        source_for(kind, model, Layout(model))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_script_modules_are_refused_with_a_sentence():
    with pytest.raises(ValueError, match=r"TorchScript.*microbatch"):
        attach(torch.jit.script(nn.Linear(3, 2)))


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_embedding_options_without_per_sample_meaning_are_refused(kind):
    model = nn.Sequential(kind(5, 3, scale_grad_by_freq=True))
    attach(model)
    sentence = r"'0' has scale_grad_by_freq=True.*scale_grad_by_freq=False"
    with pytest.raises(RuntimeError, match=sentence):
        model(torch.randint(5, (4, 2)))


def test_time_first_layer_under_batch_first_input_names_layer_and_cure():
    model = Then(lambda m, x: m.layer(x)[0], layer=nn.LSTM(3, 4))
    attach(model)
    with pytest.raises(
        RuntimeError, match=r"'layer.weight_ih_l0'.*batch_first.*batch_dim"
    ):
        model(torch.randn(5, 2, 3))


def test_samples_in_another_order_are_refused_not_mixed_up():
    model = Then(lambda m, x: m.layer(x.flip(0)), layer=nn.Linear(3, 2))
    attach(model)
    with pytest.raises(RuntimeError, match=r"'layer.weight'.*microbatch"):
        model(torch.randn(4, 3))


def test_linear_over_the_batch_itself_is_refused():
    model = Then(lambda m, x: m.layer(x.T), layer=nn.Linear(4, 2))
    attach(model)
    with pytest.raises(RuntimeError, match=r"'layer.weight'.*\(3, 4\).*batch_dim"):
        model(torch.randn(4, 3))


def test_parameter_that_does_not_line_up_is_named():
    model = Then(lambda m, x: torch.cat([x, m.extra]), extra=vector(1, 3))
    attach(model)
    with pytest.raises(RuntimeError, match=r"'extra'.*concatenated"):
        model(torch.randn(4, 3))


def test_operation_that_cannot_be_split_by_sample_is_named():
    class Opaque(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            return x * w

        @staticmethod
        def backward(ctx, delta):
            return delta, delta.sum(0)

    # Of two signs: a gradient of (4, 4, 4) is no penalty's on these.
    w = nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))
    model = Then(lambda m, x: Opaque.apply(x, m.w), w=w)
    source = attach(model)
    model(torch.randn(4, 3)).sum().backward()
    with pytest.raises(
        RuntimeError, match=r"'w' has a gradient that no captured sample"
    ):
        source.take()


def test_use_outside_the_forward_pass_is_reported_by_name():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    source, x = attach(model), torch.randn(4, 3)
    (model(x).detach().sum() + model[0](x).sum()).backward()
    with pytest.raises(RuntimeError, match=r"'0.weight'.*outside model.*microbatch"):
        source.take()


@pytest.mark.parametrize("whole", [True, False])
def test_reentrant_checkpointing_is_refused_by_name(whole):
    def run(m, x):
        return m.head(m.layer(x) if whole else checkpoint(m.layer, x, **reentrant))

    reentrant = {"use_reentrant": True}
    model = Then(run, layer=nn.Linear(3, 4), head=nn.Linear(4, 2))
    attach(model)
    x = torch.randn(4, 3, requires_grad=True)
    with pytest.raises(
        RuntimeError, match=r"'layer.weight'.*reentrant.*use_reentrant=False"
    ):
        checkpoint(model, x, **reentrant) if whole else model(x)
    with torch.no_grad():
        model(x)
    assert torch._C._len_torch_function_stack() == 0


def test_input_without_a_batch_dimension_is_refused():
    model = Then(lambda m, x: m.scale * x, scale=vector(3))
    attach(model)
    with pytest.raises(RuntimeError, match="no dimension 0"):
        model(2.0)


@pytest.fixture
def fsdp(tmp_path):
    # Imported when it is needed: it takes seconds.
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    yield fsdp
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:FSDP is switching", "ignore:.*NO_SHARD")
@pytest.mark.parametrize("samples", ["per_sample", "microbatch"])
@pytest.mark.parametrize("kind", ["fsdp", "fsdp2"])
def test_parameters_split_over_workers_are_refused(kind, samples, fsdp):
    model = nn.Linear(3, 2)
    if kind == "fsdp":
        cpu = torch.device("cpu")
        model = fsdp.FullyShardedDataParallel(model, device_id=cpu)
    else:
        fsdp.fully_shard(model, mesh=dist.init_device_mesh("cpu", (1,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"is split over workers \(FSDP"):
        dome.attach(model, optimizer, rank=2, samples=samples)


def jagged(parts):
    return torch.nested.as_nested_tensor(parts, layout=torch.jagged)


NOT_DENSE = {
    "sparse": lambda x: x.to_sparse(),
    "compressed": lambda x: x.to_sparse_csr(),
    "jagged": lambda x: jagged([x[:1], x[1:]]),
    "nested": lambda x: torch.nested.as_nested_tensor([x[:1], x[1:]]),
}


@pytest.mark.filterwarnings("ignore:.*(beta state|prototype stage)")
@pytest.mark.parametrize("kind", NOT_DENSE.values(), ids=NOT_DENSE.keys())
def test_samples_that_are_not_dense_are_refused_by_name(kind):
    source = attach(model := nn.Linear(3, 4))
    with pytest.raises(RuntimeError, match=r"'input'.*layout.*microbatch"):
        model(kind(torch.randn(5, 3)))
    source.detach()


@pytest.mark.filterwarnings("ignore:.*(beta state|prototype stage)")
@pytest.mark.parametrize("kind", NOT_DENSE.values(), ids=NOT_DENSE.keys())
def test_samples_that_are_made_sparse_are_refused_by_name(kind):
    model = Then(lambda m, x: m.layer(kind(x)), layer=nn.Linear(3, 4))
    source = attach(model)
    with pytest.raises(RuntimeError, match=r"'layer.weight'.*microbatch"):
        model(torch.randn(5, 3))
    source.detach()


def test_a_sparse_matrix_that_is_no_input_of_samples_is_a_constant():
    model = Then(lambda m, x, a: m.layer(x) @ a.to_dense(), layer=nn.Linear(3, 4))
    source = attach(model)
    x, a = torch.randn(5, 3), torch.eye(4).to_sparse()
    model(x, a).sum().backward()
    torch.testing.assert_close(
        source.take()[:, :12].view(5, 4, 3), x[:, None].expand(-1, 4, -1)
    )
    source.detach()


def test_complex_parameters_are_refused_by_name():
    model = Then(lambda m, x: (x * m.w).abs(), w=nn.Parameter(torch.ones(2) * 1j))
    with pytest.raises(ValueError, match=r"'w' is complex.*torch.complex"):
        dome.attach(model, torch.optim.SGD(model.parameters()), rank=1)


@pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning")
def test_forward_mode_inside_the_model_is_refused_by_name():
    model = Then(
        lambda m, x: torch.func.jvp(m.layer, (x,), (x,))[1], layer=nn.Linear(3, 4)
    )
    source = attach(model)
    with pytest.raises(RuntimeError, match=r"'layer.weight'.*torch.func.*microbatch"):
        model(torch.randn(5, 3))
    source.detach()
