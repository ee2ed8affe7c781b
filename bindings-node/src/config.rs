//! A router's configuration: its keys are the core's, in camelCase.

use kvlane::RouterConfig;
use napi::bindgen_prelude::{BigInt, Object, Unknown};
use napi::{Either, ValueType};
use napi_derive::napi;
use serde_json::{Map, Number, Value};

use crate::clock::ClockFunction;
use crate::error::{Result, config, of_napi, to_js};
use crate::read::Given;

/// Configuration of a router; everything is optional. Unknown keys are refused by name. The Rust documentation of
/// `kvlane::RouterConfig` says what turning each of them up costs.
#[napi(object, object_from_js = false)]
#[derive(Default)]
#[expect(
    missing_debug_implementations,
    reason = "it describes a type of TypeScript"
)]
pub struct RouterOptions {
    /// Tokens per index block (default 16). Must divide the engines' block size.
    pub block_size: Option<u32>,
    /// Where knowledge of caches comes from: engine events (default), or own placements alone.
    #[napi(ts_type = "'events' | 'approximate'")]
    pub index: Option<String>,
    /// Seconds that an approximate entry is believed after its last use (default 120).
    pub ttl_seconds: Option<f64>,
    /// Seconds that a placement is believed before its engine's events confirm it (default 2).
    pub prediction_ttl_seconds: Option<f64>,
    /// Weight of uncached prefill blocks (default 1).
    pub prefill_weight: Option<f64>,
    /// Weight of active requests, in blocks per request (default 0).
    pub request_weight: Option<f64>,
    /// Share of a block's prefill saved by a hit in device memory (default 1).
    pub device_hit_credit: Option<f64>,
    /// Share saved by a hit in host memory (default 0.75).
    pub host_hit_credit: Option<f64>,
    /// Share saved by a hit on disk (default 0.25).
    pub disk_hit_credit: Option<f64>,
    /// Share saved by a hit in shared storage (default 0.5).
    pub external_hit_credit: Option<f64>,
    /// 0 takes the cheapest target (default); above, targets are sampled.
    pub temperature: Option<f64>,
    /// Seconds without activity after which a booking is released (default 300).
    pub lease_seconds: Option<f64>,
    /// Hard bound of index memory. Not available yet: any value is refused.
    pub max_index_bytes: Option<f64>,
    /// Pending engine blocks with unknown parents kept for each rank (default 65,536).
    pub max_orphan_blocks: Option<u32>,
    /// Seconds in which a worker must have published an event, or it is approximate (default 30).
    pub silent_worker_seconds: Option<f64>,
    /// Prompts that a worker may serve without an event before it is approximate (default 16).
    pub silent_worker_requests: Option<u32>,
    /// Seed of tie-breaking and sampling; drawn at start when absent.
    #[napi(ts_type = "number | bigint")]
    pub seed: Option<u64>,
    /// Returns seconds from any beginning; for tests and simulation. It is called in every call that depends on time.
    #[napi(ts_type = "() => number")]
    pub clock: Option<f64>,
}

/// Reads the options of a router.
pub(crate) fn read(
    options: Option<Given<'_, Object<'_>>>,
) -> Result<(RouterConfig, Option<ClockFunction>)> {
    let object = match options {
        None => return Ok((RouterConfig::default(), None)),
        Some(Either::A(object)) => object,
        Some(Either::B(other)) => match other.get_type().map_err(of_napi)? {
            ValueType::Undefined | ValueType::Null => return Ok((RouterConfig::default(), None)),
            _ => return Err(config("the configuration must be an object")),
        },
    };
    let (mut keys, mut clock) = (Map::new(), None);
    for key in Object::keys(&object).map_err(of_napi)? {
        if key == "clock" {
            clock = function(&object)?;
            continue;
        }
        let value = object.get::<ConfigValue<'_>>(&key).map_err(of_napi)?;
        let value = value.map_or(Ok(None), json);
        let value = value.map_err(|what| config(format!("{key} cannot be {what}")))?;
        if let Some(value) = value {
            keys.insert(snake(&key)?, value);
        }
    }
    let config = RouterConfig::from_json(&Value::Object(keys).to_string()).map_err(to_js)?;
    Ok((config, clock))
}

type ConfigValue<'a> = Either<f64, Either<String, Either<BigInt, Unknown<'a>>>>;

/// Reads a value of the configuration; absent when it is `null`.
fn json(value: ConfigValue<'_>) -> std::result::Result<Option<Value>, String> {
    Ok(Some(match value {
        Either::A(number) => number_value(number).ok_or_else(|| number.to_string())?,
        Either::B(Either::A(text)) => Value::String(text),
        Either::B(Either::B(Either::A(number))) => match number.get_u64() {
            (false, number, true) => Value::from(number),
            _ => return Err("a bigint that is negative or above 2^64".into()),
        },
        Either::B(Either::B(Either::B(other))) => match other.get_type() {
            Ok(ValueType::Undefined | ValueType::Null) => return Ok(None),
            Ok(kind) => return Err(format!("of type {}", kind.to_string().to_lowercase())),
            Err(error) => return Err(error.reason.to_string()),
        },
    }))
}

/// A whole number stays one, so that it fits keys of either kind.
fn number_value(number: f64) -> Option<Value> {
    const SAFE: f64 = 9_007_199_254_740_991.0;
    if number.fract() == 0.0 && number.abs() <= SAFE {
        #[expect(
            clippy::cast_possible_truncation,
            reason = "a whole number within 2^53"
        )]
        return Some(Value::from(number as i64));
    }
    Number::from_f64(number).map(Value::Number)
}

fn function(object: &Object<'_>) -> Result<Option<ClockFunction>> {
    let Some(value) = object.get::<Unknown<'_>>("clock").map_err(of_napi)? else {
        return Ok(None);
    };
    match value.get_type().map_err(of_napi)? {
        ValueType::Undefined | ValueType::Null => Ok(None),
        ValueType::Function => object.get::<ClockFunction>("clock").map_err(of_napi),
        _ => Err(config("clock must be a function that returns seconds")),
    }
}

/// Returns the core's name of a key. One that is written as the core writes it is unknown here.
fn snake(key: &str) -> Result<String> {
    if key.contains('_') || key.starts_with(|first: char| first.is_ascii_uppercase()) {
        return Err(config(format!(
            "unknown field {key:?}; keys are in camelCase"
        )));
    }
    let mut name = String::with_capacity(key.len() + 4);
    for char in key.chars() {
        if char.is_ascii_uppercase() {
            name.push('_');
        }
        name.push(char.to_ascii_lowercase());
    }
    Ok(name)
}
