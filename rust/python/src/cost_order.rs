//! `CostOrder`: the cost-aware order of things that Python has, by their names.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use kvweave_core::pool::CostOrder as Order;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::arguments::raised;
use crate::failure::Failure;
use crate::request::saturating_u32;
use crate::scalars::Number;

/// See [`kvweave_core::pool::CostOrder`]; calls are short, so the interpreter lock is kept.
#[pyclass(frozen, module = "kvweave._native")]
pub struct CostOrder(Mutex<Named>);

struct Named {
    order: Order,
    numbers: HashMap<Box<[u8]>, u32>,
}

impl Named {
    fn number(&self, name: &[u8]) -> Result<u32, Failure> {
        self.numbers.get(name).copied().ok_or_else(unknown)
    }

    fn taken(&mut self, name: &[u8]) -> Result<u32, Failure> {
        self.numbers.remove(name).ok_or_else(unknown)
    }
}

/// Names may be secrets of tenants, so they are not shown.
fn unknown() -> Failure {
    Failure::invalid("name", "one that has entered the order", "another")
}

impl CostOrder {
    fn lock(&self) -> MutexGuard<'_, Named> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[pymethods]
impl CostOrder {
    #[new]
    fn new(py: Python<'_>) -> PyResult<Self> {
        let order = raised(py, Order::new().map_err(Failure::from))?;
        Ok(Self(Mutex::new(Named { order, numbers: HashMap::new() })))
    }

    fn __len__(&self) -> usize {
        self.lock().numbers.len()
    }

    fn __contains__(&self, name: &Bound<'_, PyBytes>) -> bool {
        self.lock().numbers.contains_key(name.as_bytes())
    }

    #[pyo3(signature = (name, cost, *, again = false))]
    fn enter(&self, name: &Bound<'_, PyBytes>, cost: Number, again: bool) -> PyResult<()> {
        let (py, mut named) = (name.py(), self.lock());
        let cost = raised(py, saturating_u32("cost", cost))?;
        if named.numbers.contains_key(name.as_bytes()) {
            let failure = Failure::invalid("name", "one that has not entered yet", "one that has");
            return Err(failure.raise(py));
        }
        let number = match again {
            true => named.order.enter_again(cost),
            false => named.order.enter(cost),
        };
        named.numbers.insert(name.as_bytes().into(), number);
        Ok(())
    }

    fn note_used(&self, name: &Bound<'_, PyBytes>) -> PyResult<()> {
        let mut named = self.lock();
        let number = raised(name.py(), named.number(name.as_bytes()))?;
        named.order.note_used(number);
        Ok(())
    }

    fn note_gone(&self, name: &Bound<'_, PyBytes>) -> PyResult<()> {
        let mut named = self.lock();
        let number = raised(name.py(), named.taken(name.as_bytes()))?;
        named.order.note_gone(number);
        Ok(())
    }

    fn withdraw(&self, name: &Bound<'_, PyBytes>) -> PyResult<()> {
        let mut named = self.lock();
        let number = raised(name.py(), named.taken(name.as_bytes()))?;
        named.order.withdraw(number);
        Ok(())
    }

    fn rank(&self, name: &Bound<'_, PyBytes>) -> PyResult<(u64, u64)> {
        let named = self.lock();
        let number = raised(name.py(), named.number(name.as_bytes()))?;
        Ok(named.order.rank(number))
    }
}
