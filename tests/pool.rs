//! Promise: whatever sequences do in the pool (grow, fork, go, run out of memory), attention reads from each just the
//! tokens that were put into it, encoded and coded by one rule.

mod pool_cases;
mod pool_entry;

use std::sync::Arc;

use candle_core::{Device, Tensor};
use oscar_kv::kv::attention::Dims;
use oscar_kv::kv::pool::{PageCounts, Pool, PoolShape, Transforms};
use oscar_kv::zoo::Windows;
use proptest::prelude::*;

use pool_cases::{Promise, cases, run};
use pool_entry::entry;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn the_cpu_pool_is_a_list_of_tokens(case in cases()) {
        let promise = Promise { device: &Device::Cpu, tolerance: 1e-5, exact: true };
        run(&case, &|shape, capacity| Pool::cpu(shape, capacity).unwrap(), promise);
    }
}

fn shape(dims: Dims, int2: bool) -> PoolShape {
    let transforms = Transforms::new(&entry(2, dims, dims.head_dim, 1)).unwrap();
    PoolShape {
        layers: 2,
        dims,
        windows: Windows {
            sink_tokens: 64,
            recent_tokens: 256,
        },
        transforms: int2.then(|| Arc::new(transforms)),
    }
}

fn append(
    pool: &mut Pool,
    appends: &[(oscar_kv::kv::pool::SequenceId, usize)],
) -> oscar_kv::Result<()> {
    let Dims {
        heads,
        kv_heads,
        head_dim,
    } = pool.shape().dims;
    let tokens = appends.iter().map(|&(_, n)| n).sum::<usize>();
    let tensor = |heads| Tensor::randn(0f32, 1.0, (tokens, heads, head_dim), &Device::Cpu).unwrap();
    pool.begin(appends)?;
    for layer in 0..2 {
        pool.attend(layer, &tensor(heads), &tensor(kv_heads), &tensor(kv_heads))?;
    }
    pool.finish()
}

#[test]
fn sequences_that_share_a_prefix_go_on_sharing_it_as_history() {
    let dims = Dims::new(4, 2, 64).unwrap();
    let mut pool = Pool::cpu(shape(dims, true), PageCounts { bf16: 20, int2: 20 }).unwrap();
    let first = pool.create();
    append(&mut pool, &[(first, 320)]).unwrap();
    let second = pool.fork(first).unwrap();
    assert_eq!(pool.usage().used, PageCounts { bf16: 5, int2: 0 });
    append(&mut pool, &[(first, 1)]).unwrap();
    append(&mut pool, &[(second, 1)]).unwrap();
    assert_eq!(
        pool.usage().used,
        PageCounts {
            bf16: 4 + 2,
            int2: 1
        }
    );
    append(&mut pool, &[(first, 64), (second, 64)]).unwrap();
    assert_eq!(
        pool.usage().used,
        PageCounts {
            bf16: 3 + 4,
            int2: 2
        }
    );
    pool.free(first).unwrap();
    append(&mut pool, &[(second, 64)]).unwrap();
    assert_eq!(pool.usage().used, PageCounts { bf16: 5, int2: 3 });
    pool.free(second).unwrap();
    assert_eq!(pool.usage().used, PageCounts::default());
}

#[test]
fn running_out_names_pages_and_bytes_and_loses_nothing() {
    let dims = Dims::new(4, 2, 64).unwrap();
    let shape = shape(dims, true);
    let capacity = shape.pages_for(1, 400, 64).unwrap();
    assert_eq!(capacity, PageCounts { bf16: 6, int2: 2 });
    let mut pool = Pool::cpu(shape.clone(), capacity).unwrap();
    let id = pool.create();
    for n in [64, 64, 64, 64, 64, 64, 16] {
        append(&mut pool, &[(id, n)]).unwrap();
    }
    let other = pool.create();
    let before = pool.usage();
    let message = append(&mut pool, &[(id, 1), (other, 70)])
        .unwrap_err()
        .to_string();
    let bytes = 2 * shape.page_bytes().unwrap().bf16;
    assert!(
        message.contains(&format!(
            "needs 2 BF16 pages ({bytes} bytes), where 1 of 6 are free"
        )),
        "{message}"
    );
    assert_eq!((pool.usage(), pool.tokens(id).unwrap()), (before, 400));
    append(&mut pool, &[(id, 1)]).unwrap();
}

#[test]
fn an_int2_history_takes_a_seventh_of_the_bytes() {
    let dims = Dims::new(32, 8, 128).unwrap();
    let (int2, bf16) = (shape(dims, true), shape(dims, false));
    let tokens = 100 << 10;
    let bytes = |shape: &PoolShape| {
        let pages = shape.pages_for(1, tokens, 1).unwrap();
        let each = shape.page_bytes().unwrap();
        pages.bf16 * each.bf16 + pages.int2 * each.int2
    };
    let ratio = bytes(&bf16) as f64 / bytes(&int2) as f64;
    assert!(ratio > 6.9, "{ratio}");
}

#[test]
fn what_does_not_fit_is_refused() {
    let dims = Dims::new(4, 2, 64).unwrap();
    let fits = shape(dims, true);
    let refused = |shape: PoolShape| {
        let pages = PageCounts { bf16: 8, int2: 8 };
        Pool::cpu(shape, pages).map(|_| ()).unwrap_err().to_string()
    };
    for (sink, recent) in [(4, 256), (64, 100), (64, 0)] {
        let windows = Windows {
            sink_tokens: sink,
            recent_tokens: recent,
        };
        let message = refused(PoolShape {
            windows,
            ..fits.clone()
        });
        assert!(
            message.contains("not whole pages") && message.contains("hint"),
            "{message}"
        );
    }
    let message = refused(PoolShape {
        layers: 3,
        ..fits.clone()
    });
    assert!(message.contains("layers"), "{message}");
    let dims = Dims::new(8, 2, 64).unwrap();
    let message = refused(PoolShape {
        dims,
        ..fits.clone()
    });
    assert!(message.contains("heads"), "{message}");

    let mut pool = Pool::cpu(fits, PageCounts { bf16: 8, int2: 8 }).unwrap();
    let id = pool.create();
    assert!(pool.begin(&[(id, 0)]).is_err() && pool.begin(&[(id, 1), (id, 1)]).is_err());
    assert!(pool.finish().is_err());
    let q = Tensor::zeros((1, 4, 64), candle_core::DType::F32, &Device::Cpu).unwrap();
    assert!(pool.attend(0, &q, &q, &q).is_err());
    pool.begin(&[(id, 1)]).unwrap();
    assert!(pool.attend(0, &q, &q, &q).is_err(), "k has 2 heads");
    pool.free(id).unwrap();
    assert!(pool.free(id).is_err() && pool.fork(id).is_err() && pool.begin(&[(id, 1)]).is_err());
}
