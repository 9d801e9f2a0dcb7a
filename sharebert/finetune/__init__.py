"""The verb `finetune`: GLUE, SQuAD and tables of one's own, from an exported encoder."""
