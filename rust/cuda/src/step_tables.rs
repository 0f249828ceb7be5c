//! Launch of `step_tables.cu`.

use kvweave_core::ops::{MOST_TABLES, StepShape};

use crate::backend::CudaBackend;
use crate::error::CudaError;
use crate::ffi::Grid;
use crate::operands::{DeviceTensor, blocks_of, long, narrow};
use crate::params::{SpanParams, StepTablesParams};

const THREADS: usize = 256;

/// An engine's batch as tables: `kvweave_core::ops::StepTables`, whose sizes the caller validated.
#[derive(Clone, Copy, Debug)]
pub struct StepTablesLaunch<'a> {
    /// Sizes of everything.
    pub shape: StepShape<'a>,
    /// i32 [B, M], rows `block_stride` apart.
    pub blocks: DeviceTensor,
    /// Elements from one row to the next.
    pub block_stride: usize,
    /// i32 [B].
    pub lengths: DeviceTensor,
    /// i32 [B + 1].
    pub query_start: DeviceTensor,
    /// i64 [R].
    pub slot_mapping: DeviceTensor,
    /// i32 [tables, pages].
    pub places: Option<DeviceTensor>,
    /// i32 [R].
    pub positions: DeviceTensor,
    /// i32 [tables, R, 2].
    pub slots: DeviceTensor,
    /// i32 [N, 5].
    pub entries: DeviceTensor,
    /// i32 [B · tables + 1].
    pub offsets: DeviceTensor,
    /// The stream's handle; 0 is the default stream.
    pub stream: u64,
}

impl CudaBackend {
    /// Puts the kernel on the stream. Nothing is waited for, nothing allocated.
    ///
    /// # Safety
    /// Addresses and sizes describe memory of this device that stays valid until the stream has
    /// run the kernel, `stream` is a stream of this device, and what is written lies apart from
    /// what is read.
    ///
    /// # Errors
    /// `InvalidArgument` for shapes that do not belong together, `Driver` when the launch fails.
    pub unsafe fn step_tables(&self, call: &StepTablesLaunch<'_>) -> Result<(), CudaError> {
        let chunks = chunks_of(call, self.processors() as usize);
        let params = params_of(call, chunks)?;
        let blocks = [blocks_of("requests", call.shape.requests.saturating_mul(chunks))?, 1, 1];
        let grid = Grid { blocks, threads: THREADS as u32, shared_bytes: 0 };
        // SAFETY: the params mirror the kernel's struct; addresses are the caller's promise.
        unsafe { self.launch(("step_tables", "step_tables"), grid, call.stream, &params) }
    }
}

/// Thread blocks that share a request: two for each processor in all, none without work.
fn chunks_of(call: &StepTablesLaunch<'_>, processors: usize) -> usize {
    let StepShape { requests, rows, spans, .. } = call.shape;
    let columns = spans.iter().map(|span| span.columns as usize).max().unwrap_or(0);
    let useful = columns.max(rows).div_ceil(THREADS).max(1);
    (2 * processors).div_ceil(requests.max(1)).clamp(1, useful)
}

fn params_of(call: &StepTablesLaunch<'_>, chunks: usize) -> Result<StepTablesParams, CudaError> {
    let shape = &call.shape;
    let (requests, rows, tables) = (shape.requests, shape.rows, shape.spans.len());
    if requests == 0 || tables == 0 || tables > MOST_TABLES {
        let expected = format!("at least 1 of each and at most {MOST_TABLES} tables");
        let got = format!("{requests} and {tables}");
        return Err(CudaError::invalid("requests and tables", expected, got));
    }
    let extent = (requests - 1).saturating_mul(call.block_stride).saturating_add(shape.columns);
    call.blocks.expect("blocks", if shape.columns == 0 { 0 } else { extent })?;
    call.lengths.expect("lengths", requests)?;
    call.query_start.expect("query_start", requests + 1)?;
    call.slot_mapping.expect("slot_mapping", rows)?;
    call.positions.expect("positions", rows)?;
    call.slots.expect("slots", rows.saturating_mul(2 * tables))?;
    call.entries.expect("entries", shape.entries().saturating_mul(5))?;
    call.offsets.expect("offsets", requests.saturating_mul(tables).saturating_add(1))?;
    let pages = shape.places.unwrap_or(0);
    if let Some(places) = call.places {
        places.expect("places", tables.saturating_mul(pages))?;
    }
    let mut spans = [SpanParams::default(); MOST_TABLES];
    for (params, span) in spans.iter_mut().zip(shape.spans) {
        let sinks = (span.sink as usize).div_ceil(shape.page_tokens.max(1));
        *params = SpanParams {
            window: span.window,
            sinks: if span.window > 0 { narrow("sink", sinks)? } else { 0 },
            columns: span.columns,
        };
    }
    Ok(StepTablesParams {
        blocks: call.blocks.address,
        lengths: call.lengths.address,
        query_start: call.query_start.address,
        slot_mapping: call.slot_mapping.address,
        places: call.places.map_or(0, |places| places.address),
        positions: call.positions.address,
        slots: call.slots.address,
        entries: call.entries.address,
        offsets: call.offsets.address,
        block_stride: long("blocks", call.block_stride)?,
        requests: narrow("requests", requests)?,
        rows: narrow("rows", rows)?,
        columns: narrow("columns of blocks", shape.columns)?,
        page_tokens: narrow("page_tokens", shape.page_tokens)?,
        block_pages: narrow("block_pages", shape.block_pages)?,
        pages: narrow("places", pages)?,
        tables: narrow("tables", tables)?,
        chunks: narrow("requests", chunks)?,
        spans,
    })
}

#[cfg(test)]
mod tests {
    use kvweave_core::ops::TableSpan;

    use super::*;

    fn call(spans: &[TableSpan], requests: usize, len: usize) -> StepTablesLaunch<'_> {
        let columns = 8192;
        let shape = StepShape {
            requests,
            rows: requests,
            columns,
            page_tokens: 16,
            block_pages: 8,
            spans,
            places: None,
        };
        let tensor = DeviceTensor { address: 256, len };
        StepTablesLaunch {
            shape,
            blocks: tensor,
            block_stride: columns,
            lengths: tensor,
            query_start: tensor,
            slot_mapping: tensor,
            places: None,
            positions: tensor,
            slots: tensor,
            entries: tensor,
            offsets: tensor,
            stream: 0,
        }
    }

    #[test]
    fn few_requests_share_the_device_and_many_have_a_block_each() {
        let long = [TableSpan { window: 0, sink: 0, columns: 8192 }];
        let short = [TableSpan { window: 40, sink: 20, columns: 6 }];
        let chunks = |spans, requests| chunks_of(&call(spans, requests, 0), 132);
        assert_eq!(
            [1, 8, 100, 264, 5000].map(|requests| chunks(&long, requests)),
            [32, 32, 3, 1, 1]
        );
        assert_eq!([1, 8, 5000].map(|requests| chunks(&short, requests)), [1, 1, 1]);
    }

    #[test]
    fn memory_that_is_too_small_is_refused() {
        let spans = [TableSpan { window: 0, sink: 0, columns: 8192 }];
        let needed = 2 * 8192 * 5;
        assert!(params_of(&call(&spans, 2, needed), 1).is_ok());
        let refused = params_of(&call(&spans, 2, needed - 1), 1).map(|params| params.rows);
        let expected = "at least 81920 elements";
        assert_eq!(refused, Err(CudaError::invalid("entries", expected, needed - 1)));
    }

    #[test]
    fn a_sink_counts_beside_a_window_alone() {
        let span = |window| [TableSpan { window, sink: 20, columns: 1 }];
        let sinks = |window| params_of(&call(&span(window), 1, 9000), 1).map(|p| p.spans[0].sinks);
        assert_eq!([sinks(0), sinks(5)], [Ok(0), Ok(2)]);
    }
}
