#: demo
SPLITS="{train: {data: runs/demo/data, periods: 2026-W01..2026-W05}, validation: {data: runs/demo/data, periods: 2026-W06}, test: {data: runs/demo/data, periods: 2026-W07..2026-W08}}"
MODELS="{gbdt: runs/demo/seed-0/gbdt/model, simclr: runs/demo/seed-0/simclr_rank/model}"
NETWORK="network: {encoder: {kind: mlp}}, epochs: 2, head_epochs: 0"
TREES="num_trees: 20, num_leaves: 8, num_threads: 1"
TRAIN="{data: runs/demo/data, periods: 2026-W01..2026-W05}"
job pipeline --config configs/demo.yaml
job evaluate out=runs/report evaluate.models="$MODELS" evaluate.splits="$SPLITS" evaluate.slices="{long: n_documents > 20, bought: max_label >= 4}" evaluate.slice_by="[period, n_relevant]" evaluate.by_period=true
job report evaluation=runs/report out=runs/page
job explain out=runs/contrast data=runs/demo/data periods=2026-W01..2026-W05 bundle=runs/demo/seed-0/simclr_rank/pretrained
job interleave out=runs/interleaved models="$MODELS" test="{data: runs/demo/data, periods: 2026-W07}"
job reconcile out=runs/why source="{kind: bundle, bundle: runs/demo/seed-0/gbdt/model, split: {data: runs/demo/data, periods: 2026-W07}}"
job gate --config configs/gate.yaml
job score out=runs/scores bundle=runs/demo/seed-0/simclr_rank/model data=runs/demo/data periods=2026-W08
job score out=runs/scores-by-ray bundle=runs/demo/seed-0/gbdt/model data=runs/demo/data periods=2026-W08 --ray
job predict out=runs/ranked bundle=runs/demo/seed-0/gbdt/model inputs="runs/demo/data-log/*W08*/*.parquet"
job export --to lightgbm out=runs/export-lightgbm bundle=runs/demo/seed-0/gbdt/model data=runs/demo/data
job export --to onnx out=runs/export-onnx bundle=runs/demo/seed-0/simclr_rank/model data=runs/demo/data
job relabel data=runs/demo/data out=runs/few relabel.steps="[{kind: labelled_fraction, fraction: 0.1}]"
job train_gbdt out=runs/trees splits="$SPLITS" gbdt="{$TREES}"
job train_gbdt out=runs/shared-trees splits="$SPLITS" gbdt="{$TREES}" workers="{number: 2, cpus: 1}"
job train_gbdt out=runs/xgboost splits="$SPLITS" gbdt="{kind: xgboost, num_trees: 20, max_leaves: 8, num_threads: 1}"
job train_gbdt out=runs/catboost splits="$SPLITS" gbdt="{kind: catboost, num_trees: 20, num_threads: 1}"
job train_gbdt out=runs/mean splits="$SPLITS" ensemble="{candidates: 3, most: 2}" gbdt="{$TREES, feature_fraction: 0.5}"
job pipeline out=runs/stack data=runs/demo/data splits="$SPLITS" evaluate.baseline=trees methods="{trees: {kind: gbdt, gbdt: {$TREES}}, network: {kind: neural, finetune: {$NETWORK}}, stack: {kind: stack, members: [trees, network], stack: {folds: 2, gbdt: {$TREES}}}}"
job tune out=runs/search trials=3 space="{gbdt.num_leaves: {low: 4, high: 64, integer: true}}" job="{kind: gbdt, gbdt: {$TREES}, splits: $SPLITS}"
job finetune out=runs/mlp splits="$SPLITS" finetune="{$NETWORK}"
job refit out=runs/final bundle=runs/trees also="{data: runs/demo/data, periods: 2026-W07}"
job refit out=runs/final-network bundle=runs/mlp
job finetune out=runs/attention splits="$SPLITS" finetune="{network: {encoder: {kind: resnet}}, context: {kind: rankformer}, epochs: 1, head_epochs: 0, loss: {kind: pirank}}"
job pretrain out=runs/scarf train="$TRAIN" pretrain="{method: {kind: scarf}, epochs: 1}"
job pretrain out=runs/vime train="$TRAIN" pretrain="{method: {kind: vime}, epochs: 1}"
job pretrain out=runs/subtab train="$TRAIN" pretrain="{method: {kind: subtab}, epochs: 1}"
job pretrain out=runs/two-workers train="$TRAIN" pretrain="{epochs: 1, stream: {docs_per_batch: 4096, streams: 2}}" --workers 2
#: mq2008
job pipeline --config configs/mq2008.yaml
job prepare --config configs/prepare-mq2008.yaml
job pipeline --config configs/mq2008-stack.yaml seeds="[0]"
job pipeline --config configs/semi-mq2008.yaml seeds="[0]"
job pipeline --config configs/self-trained-mq2008.yaml seeds="[0]"
job finetune --config configs/teacher-mq2008.yaml
job distill --config configs/distill-demo.yaml
job relabel --config configs/relabel-clicks-mq2008.yaml
job relabel --config configs/relabel-log-mq2008.yaml
job clicks log="{data: runs/data/mq2008-log}" out=runs/clicks
job study --config configs/study-mq2008.yaml grid="[{labelled: [24, 118], draws: 2}]"
#: news
job prepare --config configs/prepare-news-sample.yaml
job init ../shared/data/news/sample out=runs/first
#: text
job pipeline --config configs/sun23.yaml
