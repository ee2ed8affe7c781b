//! Passes the link arguments of an add-on.

fn main() {
    napi_build::setup();
}
