//! Kernels by name, loaded when they are first asked for.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock, PoisonError, RwLock};

use crate::error::CudaError;
use crate::ffi::{Context, Function, Module};
use crate::images;

/// A lock taken in spite of a panic elsewhere: both tables are whole between any two statements.
type Table<K, V> = RwLock<HashMap<K, Arc<V>>>;

/// One image of `csrc/*.cu`; what its load said stays.
type Image = OnceLock<Result<Module, CudaError>>;

/// The modules and functions of one device. An op that nobody calls costs nothing; a call of one
/// that was used before takes two look-ups.
#[derive(Debug, Default)]
pub(crate) struct Kernels {
    // Fields drop in this order: functions belong to modules.
    functions: Table<String, Function>,
    images: Table<&'static str, Image>,
}

impl Kernels {
    /// The kernel `name` of `csrc/<source>.cu`. Names are unique over all sources.
    ///
    /// # Errors
    /// `Unsupported` when this build lacks the source, `Driver` when the device cannot load it.
    pub(crate) fn get(
        &self,
        context: &Arc<Context>,
        source: &'static str,
        name: &str,
    ) -> Result<Arc<Function>, CudaError> {
        if let Some(known) = self.functions.read().unwrap_or_else(PoisonError::into_inner).get(name)
        {
            return Ok(Arc::clone(known));
        }
        let image = self.image(source);
        let module = image.get_or_init(|| load(context, source)).as_ref().map_err(Clone::clone)?;
        let found = Arc::new(module.function(name)?);
        let mut functions = self.functions.write().unwrap_or_else(PoisonError::into_inner);
        Ok(Arc::clone(functions.entry(name.to_owned()).or_insert(found)))
    }

    fn image(&self, source: &'static str) -> Arc<Image> {
        let mut images = self.images.write().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(images.entry(source).or_default())
    }
}

fn load(context: &Arc<Context>, source: &'static str) -> Result<Module, CudaError> {
    let image = images::get(source).ok_or_else(|| {
        CudaError::unsupported("kernels", format!("{source} in this build"), "none")
    })?;
    Module::load(context, image)
}
