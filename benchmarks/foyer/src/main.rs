//! Writes values to foyer's disk cache, opens it anew and reads them all, some at a time.
//!
//! `foyer-peer FOLDER VALUES BYTES IN_FLIGHT ROUNDS` prints a line with the seconds of each round.

use std::time::Instant;

use anyhow::{Context, Result, ensure};
use foyer::{
    BlockEngineConfig, Compression, DeviceBuilder, FsDeviceBuilder, HybridCache,
    HybridCacheBuilder, HybridCachePolicy, PsyncIoEngineConfig,
};
use futures::{StreamExt, TryStreamExt, stream};

const MIB: usize = 1 << 20;

type Values = HybridCache<u64, Vec<u8>>;

async fn opened(folder: &str, values: usize, bytes: usize) -> Result<Values> {
    let block = bytes + 8 * MIB;
    // Blocks beyond those that are needed stay clean, so that nothing is evicted.
    let device = FsDeviceBuilder::new(folder)
        .with_capacity((values + 4) * block)
        .with_direct(true)
        .build()?;
    let engine = BlockEngineConfig::new(device)
        .with_block_size(block)
        .with_clean_block_threshold(1)
        .with_buffer_pool_size(2 * values * block)
        .with_submit_queue_size_threshold(4 * values * block);
    // Memory for nothing: every value has to come from the disk.
    Ok(HybridCacheBuilder::new()
        .with_policy(HybridCachePolicy::WriteOnInsertion)
        .memory(1)
        .with_weighter(|_, value: &Vec<u8>| value.len())
        .storage()
        .with_io_engine_config(PsyncIoEngineConfig::new())
        .with_engine_config(engine)
        .with_compression(Compression::None)
        .build()
        .await?)
}

fn value(number: u64, bytes: usize) -> Vec<u8> {
    (0..bytes as u64 / 8)
        .flat_map(|at| (at ^ number).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes())
        .collect()
}

#[tokio::main]
async fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [folder, numbers @ ..] = &arguments[..] else {
        anyhow::bail!("expected FOLDER VALUES BYTES IN_FLIGHT ROUNDS");
    };
    let numbers = numbers.iter().map(|one| one.parse());
    let numbers = numbers.collect::<Result<Vec<usize>, _>>()?;
    let &[values, bytes, in_flight, rounds] = &numbers[..] else {
        anyhow::bail!("expected four numbers, got {numbers:?}");
    };
    let written = opened(folder, values, bytes).await?;
    for number in 0..values as u64 {
        written.insert(number, value(number, bytes));
        written.storage().wait().await;
    }
    written.close().await?;
    let cache = opened(folder, values, bytes).await?;
    let mut seconds = Vec::new();
    for _ in 0..rounds {
        let begun = Instant::now();
        let read: usize = stream::iter(0..values as u64)
            .map(|number| {
                let cache = &cache;
                async move {
                    let found = cache.get(&number).await?;
                    let found = found.context("foyer has dropped a value")?;
                    Ok::<_, anyhow::Error>(found.value().len())
                }
            })
            .buffer_unordered(in_flight)
            .try_fold(0, |sum, len| async move { Ok(sum + len) })
            .await?;
        seconds.push(begun.elapsed().as_secs_f64());
        ensure!(read == values * bytes, "expected {} bytes, got {read}", values * bytes);
    }
    let first = cache.get(&0).await?.context("foyer has dropped a value")?;
    ensure!(first.value() == &value(0, bytes), "expected the bytes that were written");
    println!("{seconds:?}");
    Ok(())
}
