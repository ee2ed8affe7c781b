//! A bounded reader of msgpack values over borrowed bytes.
//!
//! It borrows strings, recurses nowhere, and never believes a length: an array or map of `n` elements needs `n` bytes that
//! are really there, so what a caller reserves by a length is bounded by the payload.

use rmp::Marker;

use super::error::{DecodeError, Problem};

/// Position in one payload. A copy is a bookmark: assigning it back rewinds.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reader<'a> {
    rest: &'a [u8],
    total_bytes: usize,
}

/// One value, or the header of a container whose elements follow.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Value<'a> {
    Nil,
    /// An integer that is not negative, however it was encoded.
    Unsigned(u64),
    /// An integer below zero.
    Negative(i64),
    Float(f64),
    /// Not checked to be UTF-8.
    Str(&'a [u8]),
    Bin(&'a [u8]),
    /// Number of elements that follow.
    Array(usize),
    /// Number of key and value pairs that follow.
    Map(usize),
    /// A boolean or an extension value, neither of which any known field holds.
    Other,
}

impl<'a> Reader<'a> {
    pub(super) const fn new(payload: &'a [u8]) -> Self {
        Self {
            rest: payload,
            total_bytes: payload.len(),
        }
    }

    /// Bytes not read yet.
    pub(super) const fn left(&self) -> usize {
        self.rest.len()
    }

    /// Builds an error about the present position.
    pub(super) const fn error(&self, problem: Problem) -> DecodeError {
        DecodeError::new(self.total_bytes - self.rest.len(), problem)
    }

    /// Reads one value; of a container only the header.
    pub(super) fn value(&mut self) -> Result<Value<'a>, DecodeError> {
        let [head] = self.chunk()?;
        Ok(match Marker::from_u8(head) {
            Marker::Null => Value::Nil,
            Marker::True | Marker::False => Value::Other,
            Marker::FixPos(value) => Value::Unsigned(value.into()),
            Marker::U8 => Value::Unsigned(u8::from_be_bytes(self.chunk()?).into()),
            Marker::U16 => Value::Unsigned(u16::from_be_bytes(self.chunk()?).into()),
            Marker::U32 => Value::Unsigned(u32::from_be_bytes(self.chunk()?).into()),
            Marker::U64 => Value::Unsigned(u64::from_be_bytes(self.chunk()?)),
            Marker::FixNeg(value) => signed(value.into()),
            Marker::I8 => signed(i8::from_be_bytes(self.chunk()?).into()),
            Marker::I16 => signed(i16::from_be_bytes(self.chunk()?).into()),
            Marker::I32 => signed(i32::from_be_bytes(self.chunk()?).into()),
            Marker::I64 => signed(i64::from_be_bytes(self.chunk()?)),
            Marker::F32 => Value::Float(f32::from_be_bytes(self.chunk()?).into()),
            Marker::F64 => Value::Float(f64::from_be_bytes(self.chunk()?)),
            Marker::FixStr(length) => Value::Str(self.take(length.into())?),
            Marker::Str8 => Value::Str(self.sized::<1>()?),
            Marker::Str16 => Value::Str(self.sized::<2>()?),
            Marker::Str32 => Value::Str(self.sized::<4>()?),
            Marker::Bin8 => Value::Bin(self.sized::<1>()?),
            Marker::Bin16 => Value::Bin(self.sized::<2>()?),
            Marker::Bin32 => Value::Bin(self.sized::<4>()?),
            Marker::FixArray(elements) => self.array(elements.into())?,
            Marker::Array16 => {
                let elements = self.length::<2>()?;
                self.array(elements)?
            }
            Marker::Array32 => {
                let elements = self.length::<4>()?;
                self.array(elements)?
            }
            Marker::FixMap(pairs) => self.map(pairs.into())?,
            Marker::Map16 => {
                let pairs = self.length::<2>()?;
                self.map(pairs)?
            }
            Marker::Map32 => {
                let pairs = self.length::<4>()?;
                self.map(pairs)?
            }
            Marker::FixExt1 => self.extension(1)?,
            Marker::FixExt2 => self.extension(2)?,
            Marker::FixExt4 => self.extension(4)?,
            Marker::FixExt8 => self.extension(8)?,
            Marker::FixExt16 => self.extension(16)?,
            Marker::Ext8 => {
                let length = self.length::<1>()?;
                self.extension(length)?
            }
            Marker::Ext16 => {
                let length = self.length::<2>()?;
                self.extension(length)?
            }
            Marker::Ext32 => {
                let length = self.length::<4>()?;
                self.extension(length)?
            }
            Marker::Reserved => return Err(self.error(Problem::Reserved)),
        })
    }

    /// Passes over one value with everything inside it and returns its bytes.
    ///
    /// A count of the values still to come takes the place of a stack, so nesting costs nothing and needs no limit.
    pub(super) fn skip(&mut self) -> Result<&'a [u8], DecodeError> {
        let start = self.rest;
        let mut pending = 1_usize;
        while pending > 0 {
            pending -= 1;
            pending += match self.value()? {
                Value::Array(elements) => elements,
                Value::Map(pairs) => 2 * pairs,
                _ => 0,
            };
            if pending > self.left() {
                return Err(self.error(Problem::Length(pending)));
            }
        }
        Ok(&start[..start.len() - self.rest.len()])
    }

    /// Appends up to `count` integers that are encoded as unsigned and fit `u32`, and returns how many there were before
    /// the first value of another form (which is left unread).
    pub(super) fn unsigned_run(&mut self, count: usize, out: &mut Vec<u32>) -> usize {
        let mut rest = self.rest;
        for done in 0..count {
            let (value, tail) = match *rest {
                [value @ ..=0x7f, ref tail @ ..] | [0xcc, value, ref tail @ ..] => {
                    (u32::from(value), tail)
                }
                [0xcd, a, b, ref tail @ ..] => (u32::from(u16::from_be_bytes([a, b])), tail),
                [0xce, a, b, c, d, ref tail @ ..] => (u32::from_be_bytes([a, b, c, d]), tail),
                _ => {
                    self.rest = rest;
                    return done;
                }
            };
            out.push(value);
            rest = tail;
        }
        self.rest = rest;
        count
    }

    fn array(&self, elements: usize) -> Result<Value<'a>, DecodeError> {
        if elements > self.left() {
            return Err(self.error(Problem::Length(elements)));
        }
        Ok(Value::Array(elements))
    }

    fn map(&self, pairs: usize) -> Result<Value<'a>, DecodeError> {
        if pairs > self.left() / 2 {
            return Err(self.error(Problem::Length(pairs)));
        }
        Ok(Value::Map(pairs))
    }

    fn extension(&mut self, length: usize) -> Result<Value<'a>, DecodeError> {
        // One byte of type goes before the content.
        self.take(length.saturating_add(1))?;
        Ok(Value::Other)
    }

    fn sized<const WIDTH: usize>(&mut self) -> Result<&'a [u8], DecodeError> {
        let length = self.length::<WIDTH>()?;
        self.take(length)
    }

    /// Reads a big-endian length of `WIDTH` bytes, at most four.
    fn length<const WIDTH: usize>(&mut self) -> Result<usize, DecodeError> {
        let bytes: [u8; WIDTH] = self.chunk()?;
        Ok(bytes
            .iter()
            .fold(0, |length, &byte| length << 8 | usize::from(byte)))
    }

    fn chunk<const N: usize>(&mut self) -> Result<[u8; N], DecodeError> {
        let Some((chunk, rest)) = self.rest.split_first_chunk() else {
            return Err(self.error(Problem::Truncated));
        };
        self.rest = rest;
        Ok(*chunk)
    }

    fn take(&mut self, length: usize) -> Result<&'a [u8], DecodeError> {
        let Some((taken, rest)) = self.rest.split_at_checked(length) else {
            return Err(self.error(Problem::Truncated));
        };
        self.rest = rest;
        Ok(taken)
    }
}

/// Sorts a signed integer by its sign, as the same number may come in either encoding.
fn signed(value: i64) -> Value<'static> {
    u64::try_from(value).map_or(Value::Negative(value), Value::Unsigned)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(bytes: &[u8]) -> Result<Value<'_>, DecodeError> {
        let mut reader = Reader::new(bytes);
        let value = reader.value()?;
        // The element of a container is the one byte that its header needs behind it.
        assert!(reader.left() <= 2, "{bytes:x?} leaves {}", reader.left());
        Ok(value)
    }

    #[test]
    fn every_width_of_a_number_reads_alike() {
        for bytes in [
            &[5_u8][..],
            &[0xcc, 5],
            &[0xcd, 0, 5],
            &[0xce, 0, 0, 0, 5],
            &[0xcf, 0, 0, 0, 0, 0, 0, 0, 5],
            &[0xd0, 5],
            &[0xd1, 0, 5],
            &[0xd2, 0, 0, 0, 5],
            &[0xd3, 0, 0, 0, 0, 0, 0, 0, 5],
        ] {
            assert_eq!(read(bytes), Ok(Value::Unsigned(5)), "{bytes:x?}");
        }
        for bytes in [
            &[0xff_u8][..],
            &[0xd0, 0xff],
            &[0xd1, 0xff, 0xff],
            &[0xd2, 0xff, 0xff, 0xff, 0xff],
            &[0xd3, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff],
        ] {
            assert_eq!(read(bytes), Ok(Value::Negative(-1)), "{bytes:x?}");
        }
        let largest = [0xcf, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff];
        assert_eq!(read(&largest), Ok(Value::Unsigned(u64::MAX)));
        assert_eq!(read(&[0xca, 0x3f, 0xc0, 0, 0]), Ok(Value::Float(1.5)));
        assert_eq!(
            read(&[0xcb, 0x3f, 0xf8, 0, 0, 0, 0, 0, 0]),
            Ok(Value::Float(1.5))
        );
    }

    #[test]
    fn every_header_width_reads_alike() {
        for bytes in [
            &[0xa1_u8, b'x'][..],
            &[0xd9, 1, b'x'],
            &[0xda, 0, 1, b'x'],
            &[0xdb, 0, 0, 0, 1, b'x'],
        ] {
            assert_eq!(read(bytes), Ok(Value::Str(b"x")), "{bytes:x?}");
        }
        for bytes in [
            &[0xc4_u8, 1, b'x'][..],
            &[0xc5, 0, 1, b'x'],
            &[0xc6, 0, 0, 0, 1, b'x'],
        ] {
            assert_eq!(read(bytes), Ok(Value::Bin(b"x")), "{bytes:x?}");
        }
        for bytes in [&[0x91_u8, 0][..], &[0xdc, 0, 1, 0], &[0xdd, 0, 0, 0, 1, 0]] {
            assert_eq!(read(bytes), Ok(Value::Array(1)), "{bytes:x?}");
        }
        for bytes in [
            &[0x81_u8, 0, 0][..],
            &[0xde, 0, 1, 0, 0],
            &[0xdf, 0, 0, 0, 1, 0, 0],
        ] {
            assert_eq!(read(bytes), Ok(Value::Map(1)), "{bytes:x?}");
        }
    }

    #[test]
    fn every_extension_is_passed_over() {
        for bytes in [
            &[0xd4_u8, 1, 0][..],
            &[0xd5, 1, 0, 0],
            &[0xd6, 1, 0, 0, 0, 0],
            &[0xd7, 1, 0, 0, 0, 0, 0, 0, 0, 0],
            &[0xd8, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
            &[0xc7, 2, 1, 0, 0],
            &[0xc8, 0, 2, 1, 0, 0],
            &[0xc9, 0, 0, 0, 2, 1, 0, 0],
        ] {
            let mut reader = Reader::new(bytes);
            assert_eq!(reader.value(), Ok(Value::Other), "{bytes:x?}");
            assert_eq!(reader.left(), 0, "{bytes:x?}");
            assert!(Reader::new(&bytes[..bytes.len() - 1]).value().is_err());
        }
        assert_eq!(read(&[0xc2]), Ok(Value::Other));
        assert_eq!(read(&[0xc3]), Ok(Value::Other));
        assert_eq!(read(&[0xc0]), Ok(Value::Nil));
    }

    #[test]
    fn lying_lengths_are_refused_at_the_header() {
        for bytes in [
            &[0x92_u8, 0][..],
            &[0xdd, 0xff, 0xff, 0xff, 0xff, 0],
            &[0xdf, 0xff, 0xff, 0xff, 0xff, 0],
            &[0xdf, 0x80, 0, 0, 0, 0],
            &[0x81, 0],
        ] {
            assert!(Reader::new(bytes).value().is_err(), "{bytes:x?}");
        }
        // Each header alone is honest, both together are not: 2 + 2 elements in 3 bytes.
        assert!(Reader::new(&[0x92, 0x92, 0, 0]).skip().is_err());
        assert_eq!(Reader::new(&[0xc1]).value().map_err(|e| e.offset()), Err(1));
    }

    #[test]
    fn depth_costs_no_stack() {
        let mut deep = vec![0x91; 1_000_000];
        deep.push(0xc0);
        deep.push(7);
        let mut reader = Reader::new(&deep);
        assert_eq!(reader.skip().map(<[u8]>::len), Ok(1_000_001));
        assert_eq!(reader.value(), Ok(Value::Unsigned(7)));
    }

    #[test]
    fn a_run_stops_at_the_first_other_form() {
        let bytes = [1, 0xcc, 200, 0xcd, 1, 0, 0xce, 0, 1, 0, 0, 0xd0, 5, 9];
        let mut reader = Reader::new(&bytes);
        let mut out = Vec::new();
        assert_eq!(reader.unsigned_run(6, &mut out), 4);
        assert_eq!(out, [1, 200, 256, 65_536]);
        assert_eq!(reader.value(), Ok(Value::Unsigned(5)));
        assert_eq!(reader.unsigned_run(1, &mut out), 1);
        assert_eq!(reader.unsigned_run(1, &mut out), 0);
        assert_eq!(out, [1, 200, 256, 65_536, 9]);
    }
}
