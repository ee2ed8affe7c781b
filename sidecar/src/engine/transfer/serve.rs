//! The side that holds: a listener that gives out what the ledger has.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt, BufWriter};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::ledger::Ledger;
use super::wire::{DONE, MAX_HEAD, Offer, TIME_LIMIT, Wanted};
use super::{Place, tcp};
use crate::frame;

/// What a listener gives out.
#[derive(Clone, Debug)]
pub(super) struct Holder {
    pub(super) ledger: Arc<Ledger>,
    pub(super) bytes_per_token: usize,
    /// Where blocks lie for peers that read them with NIXL.
    pub(super) pool: Option<Arc<dyn Place>>,
}

impl Holder {
    /// Serves until cancelled.
    pub(super) async fn serve(
        self,
        listener: TcpListener,
        cancel: CancellationToken,
        tasks: TaskTracker,
    ) {
        loop {
            let accepted = tokio::select! {
                () = cancel.cancelled() => return,
                accepted = listener.accept() => accepted,
            };
            match accepted {
                Ok((stream, _)) => {
                    let (holder, cancel) = (self.clone(), cancel.clone());
                    tasks.spawn(async move {
                        let serving = tokio::time::timeout(TIME_LIMIT, holder.serve_one(stream));
                        tokio::select! {
                            () = cancel.cancelled() => {}
                            served = serving => tracing::debug!(?served, "fetch ended"),
                        }
                    });
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a fetch");
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
            }
        }
    }

    async fn serve_one(&self, stream: TcpStream) -> io::Result<()> {
        stream.set_nodelay(true)?;
        let (mut reader, writer) = stream.into_split();
        let mut writer = BufWriter::with_capacity(1 << 16, writer);
        let head = frame::read(&mut reader, MAX_HEAD).await?;
        let wanted: Wanted = serde_json::from_slice(&head)?;
        let moving = self
            .ledger
            .begin_move(&wanted.engine_id, &wanted.request_id, wanted.digest);
        let moving = match moving {
            Ok(moving) => moving,
            Err(reason) => {
                let offer = Offer {
                    refused: Some(reason.as_str().to_owned()),
                    ..Offer::default()
                };
                frame::write(&mut writer, &serde_json::to_vec(&offer)?).await?;
                return writer.flush().await;
            }
        };
        let placed = self.pool.as_ref().filter(|_| wanted.nixl);
        let placed = placed.and_then(|pool| Some((pool, pool.list(&moving)?)));
        let offer = Offer {
            blocks: moving.content.blocks(),
            refused: None,
            nixl: placed.as_ref().map(|(pool, _)| pool.placement()),
        };
        frame::write(&mut writer, &serde_json::to_vec(&offer)?).await?;
        match placed {
            Some((pool, list)) => {
                let metadata: &[u8] = if wanted.known { &[] } else { pool.metadata() };
                frame::write(&mut writer, metadata).await?;
                frame::write(&mut writer, &list).await?;
                writer.flush().await?;
            }
            None => tcp::send(&mut writer, &moving, self.bytes_per_token).await?,
        }
        if reader.read_u8().await? == DONE {
            moving.collected();
        }
        Ok(())
    }
}
